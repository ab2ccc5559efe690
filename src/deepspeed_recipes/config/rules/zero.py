"""Rules about ZeRO stages, and about offload to the CPU and to NVMe, ZenFlow and SuperOffload."""

from collections.abc import Iterator

from ..rule import COSTS, FAILS_LATER, REJECTED, WRONG, Config, Edit, Facts, Hit, rule, shown

_ZERO = "zero_optimization"
_NEEDS_STAGE_3 = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")


@rule("needs-stage-3", "error", WRONG)
def _stage_3_only(config: Config, facts: Facts) -> Iterator[Hit]:
    if config.stage not in (0, 1, 2):
        return
    zero = config.section(_ZERO)
    on = [name for name in _NEEDS_STAGE_3 if config.on(_ZERO, name)]
    if (config.number(_ZERO, "zero_hpz_partition_size") or 1) > 1:
        on.append("zero_hpz_partition_size")
    for name in on:
        what = f"`{name}` is a stage 3 feature and does nothing at stage {config.stage}"
        yield Hit((_ZERO, name), zero[name], what, "set the stage to 3, or remove it")


@rule("stage-3-key-below-stage-3", "warning", COSTS)
def _stage_3_keys(config: Config, facts: Facts) -> Iterator[Hit]:
    if config.stage not in (0, 1, 2):
        return
    for name, value in config.section(_ZERO).items():
        if name.startswith("stage3_"):
            what = f"`{name}` has no effect at stage {config.stage}"
            yield Hit((_ZERO, name), value, what, "remove it, or set the stage to 3")


@rule("no-gather-on-save", "warning", WRONG)
def _gather_on_save(config: Config, facts: Facts) -> Iterator[Hit]:
    names = ("stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save")
    old = "stage3_gather_fp16_weights_on_model_save"
    if config.stage != 3 or any(config.on(_ZERO, name) for name in (*names, old)):
        return
    path = (_ZERO, names[0])
    what = "save_model writes no weights that transformers can load, and writes the checkpoint twice"
    if config.offload_device("offload_optimizer") == "nvme":
        what = "saving fails with FileExistsError: the fallback writes the NVMe states twice"
    yield Hit(path, config.get(*path), what, "set it to true", (Edit("set", path, True),))


@rule("prefetch-off", "warning", COSTS)
def _prefetch(config: Config, facts: Facts) -> Iterator[Hit]:
    overlap = config.on(_ZERO, "overlap_comm", default=True)
    if config.stage != 3 or not overlap:
        return
    for name in ("stage3_prefetch_bucket_size", "prefetch_bucket_size"):
        if config.number(_ZERO, name) == 0:
            what = "prefetch is off although `overlap_comm` is on, so every layer waits for its parameters"
            yield Hit((_ZERO, name), 0, what, 'write "auto", or about 0.9 times the square of the hidden size')


@rule("sub-group-size-0", "warning", COSTS)
def _sub_group(config: Config, facts: Facts) -> Iterator[Hit]:
    size = config.number(_ZERO, "sub_group_size")
    if config.stage == 3 and size == 0:
        what = "with 0 every parameter is a group of its own, with its own optimizer call (and NVMe read)"
        yield Hit((_ZERO, "sub_group_size"), size, what, "remove it (the default is 1e9), or write 1e8")


@rule("round-robin-order", "warning", WRONG)
def _round_robin(config: Config, facts: Facts) -> Iterator[Hit]:
    path = (_ZERO, "round_robin_gradients")
    if config.stage in (1, 2) and config.on(*path):
        what = "in universal checkpoints and `safe_get_full_fp32_param`, weights have the fp32 copies of others"
        yield Hit(path, config.get(*path), what, "remove it", (Edit("remove", path),))


@rule("live-parameters-0", "warning", COSTS)
def _live_parameters(config: Config, facts: Facts) -> Iterator[Hit]:
    if config.stage != 3:
        return
    for name in ("stage3_max_live_parameters", "stage3_max_reuse_distance"):
        if config.number(_ZERO, name) == 0:
            what = "with 0 every layer is released at once, so the backward pass gathers it again"
            yield Hit((_ZERO, name), 0, what, "remove it (the default is 1e9)")


@rule("grad-norm-off", "error", REJECTED)
def _grad_norm(config: Config, facts: Facts) -> Iterator[Hit]:
    path = (_ZERO, "compute_grad_norm")
    value = config.get(*path, default=True)
    if value != "auto" and not config.on(*path, default=True) and config.stage in (None, 0, 3):
        yield Hit(path, value, "works only at stages 1 and 2", "remove it", (Edit("remove", path),))


@rule("grad-norm-off-but-needed", "error", FAILS_LATER)
def _grad_norm_and_clipping(config: Config, facts: Facts) -> Iterator[Hit]:
    path = (_ZERO, "compute_grad_norm")
    if config.on(*path, default=True) or config.stage not in (1, 2):
        return
    clipping = config.get("gradient_clipping", default=1.0)
    offloaded = config.offload_device("offload_optimizer")
    if offloaded or config.has(_ZERO, "zenflow") or (clipping != "auto" and clipping not in (0, None)):
        why = "optimizer offload" if offloaded else "gradient clipping (1.0 unless it is set to 0)"
        yield Hit(path, config.get(*path), f"{why} needs the norm", "remove it")


@rule("legacy-stage-1", "error", FAILS_LATER)
def _legacy_stage_1(config: Config, facts: Facts) -> Iterator[Hit]:
    path = (_ZERO, "legacy_stage1")
    if config.stage in (1, 2, 3) and config.on(*path):
        yield Hit(
            path, True, "the old implementation of stage 1 has been removed", "remove it", (Edit("remove", path),)
        )


@rule("legacy-zero-format", "warning", COSTS)
def _legacy_format(config: Config, facts: Facts) -> Iterator[Hit]:
    value = config.get(_ZERO)
    if isinstance(value, bool):
        what = f"{shown(value)} is the old spelling of stage {int(value)}"
        new = {"stage": int(value)}
        yield Hit((_ZERO,), value, what, f"write {shown(new)}", (Edit("set", (_ZERO,), new),))


@rule("scaling-before-scatter", "error", FAILS_LATER)
def _predivide(config: Config, facts: Facts) -> Iterator[Hit]:
    if config.stage not in (2, 3) or not config.on(_ZERO, "reduce_scatter", default=True):
        return
    factor = config.number("gradient_predivide_factor")
    if config.get("prescale_gradients") not in (None, False, 0, ""):
        what = f"stage {config.stage} uses reduce-scatter, which cannot scale gradients before the sum"
        yield Hit(("prescale_gradients",), config.get("prescale_gradients"), what, "remove it")
    elif factor is not None and factor != 1:
        what = f"stage {config.stage} uses reduce-scatter, which cannot divide gradients before the sum"
        yield Hit(("gradient_predivide_factor",), factor, what, "remove it")


@rule("sum-of-gradients", "error", REJECTED)
def _sum(config: Config, facts: Facts) -> Iterator[Hit]:
    value = config.text("gradient_allreduce_op")
    if value is None or value.lower() != "sum":
        return
    deepcompile = config.on("compile", "deepcompile")
    if config.stage == 3 or isinstance(config.get(_ZERO, "zenflow"), dict) or deepcompile:
        what = '"sum" is not supported with ZeRO stage 3, ZenFlow or DeepCompile'
        yield Hit(("gradient_allreduce_op",), value, what, 'write "mean"')


@rule("offload-param-below-stage-3", "error", WRONG)
def _offload_param(config: Config, facts: Facts) -> Iterator[Hit]:
    if config.stage in (0, 1, 2) and config.offload_device("offload_param"):
        what = f"stage {config.stage} keeps all parameters on the GPU and ignores `offload_param`"
        path = (_ZERO, "offload_param")
        yield Hit(path, config.get(*path), what, "set the stage to 3, or remove `offload_param`")


@rule("offload-optimizer-at-stage-0", "error", WRONG)
def _offload_optimizer(config: Config, facts: Facts) -> Iterator[Hit]:
    if config.stage == 0 and config.offload_device("offload_optimizer"):
        path = (_ZERO, "offload_optimizer")
        what = "stage 0 has no ZeRO optimizer, so the states stay on the GPU"
        yield Hit(path, config.get(*path), what, "set the stage to 1, 2 or 3, or remove `offload_optimizer`")


@rule("offload-with-own-optimizer", "warning", FAILS_LATER)
def _client_optimizer(config: Config, facts: Facts) -> Iterator[Hit]:
    path = (_ZERO, "offload_optimizer", "device")
    forced = config.get("zero_force_ds_cpu_optimizer", default=True)
    offloaded = config.offload_device("offload_optimizer")
    built = config.text("optimizer", "type") is not None
    if facts.trainer == "plain" and offloaded and config.stage in (1, 2, 3) and forced and not built:
        what = (
            "without an `optimizer` block, initialize refuses every optimizer but DeepSpeedCPUAdam and DeepSpeedCPULion"
        )
        yield Hit(path, offloaded, what, "pass one of them, or add an `optimizer` block")


@rule("super-offload-below-stage-3", "error", WRONG)
def _super_offload(config: Config, facts: Facts) -> Iterator[Hit]:
    path = (_ZERO, "offload_optimizer", "super_offload")
    if config.stage in (0, 1, 2) and config.on(*path):
        what = f"SuperOffload works only at stage 3; stage {config.stage} offloads the ordinary way"
        yield Hit(path, config.get(*path), what, "set the stage to 3, or remove it")


@rule("nvme-without-path", "error", FAILS_LATER)
def _nvme_path(config: Config, facts: Facts) -> Iterator[Hit]:
    for what in ("offload_optimizer", "offload_param"):
        path = (_ZERO, what, "nvme_path")
        if config.offload_device(what) == "nvme" and not config.get(*path):
            message = 'the device is "nvme", but there is no folder'
            yield Hit(path, config.get(*path), message, "set `nvme_path` to a folder on a local NVMe drive")


@rule("nvme-below-stage-3", "error", WRONG)
def _nvme_stage(config: Config, facts: Facts) -> Iterator[Hit]:
    path = (_ZERO, "offload_optimizer", "device")
    if config.stage in (1, 2) and config.offload_device("offload_optimizer") == "nvme":
        what = f"stage {config.stage} cannot swap to NVMe and keeps the states in CPU memory"
        yield Hit(path, "nvme", what, 'set the stage to 3, or the device to "cpu"')


@rule("ratio-below-stage-3", "error", REJECTED)
def _ratio(config: Config, facts: Facts) -> Iterator[Hit]:
    path = (_ZERO, "offload_optimizer", "ratio")
    ratio = config.number(*path)
    stage = 0 if config.stage is None else config.stage
    if ratio is not None and 0 <= ratio < 1 and stage != 3:
        what = f"partial offload ({shown(ratio)}) works only at stage 3"
        yield Hit(path, ratio, what, "remove `ratio`, or set the stage to 3")


@rule("zenflow-without-offload", "error", FAILS_LATER)
def _zenflow(config: Config, facts: Facts) -> Iterator[Hit]:
    if not isinstance(config.get(_ZERO, "zenflow"), dict):
        return
    path = (_ZERO, "zenflow")
    if config.stage in (1, 2, 3) and config.offload_device("offload_optimizer") != "cpu":
        yield Hit(path, config.get(*path), "ZenFlow needs an optimizer that is offloaded to the CPU")
    elif config.stage == 0:
        yield Hit(path, config.get(*path), "ZenFlow needs ZeRO stage 1, 2 or 3", "set the stage to 2")
