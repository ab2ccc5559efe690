"""ZeRO stages and offload: what a stage ignores, what it refuses, what it makes slow."""

from collections.abc import Iterator

from recipes.zero_config import schema
from recipes.zero_config.rule import (
    COSTS,
    FAILS_LATER,
    REJECTED,
    WRONG,
    Config,
    Edit,
    Facts,
    Hit,
    Rule,
    shown,
)

_ZERO = "zero_optimization"
_NEEDS_STAGE_3 = (
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
)


def _offload_param(config: Config, facts: Facts) -> Iterator[Hit]:
    if config.stage in (0, 1, 2) and config.offload_device("offload_param"):
        what = f"stage {config.stage} keeps every parameter on the GPU: `offload_param` is not looked at"
        path = (_ZERO, "offload_param")
        yield Hit(path, config.get(*path), what, "set the stage to 3, or remove `offload_param`")


def _offload_optimizer(config: Config, facts: Facts) -> Iterator[Hit]:
    if config.stage == 0 and config.offload_device("offload_optimizer"):
        path = (_ZERO, "offload_optimizer")
        what = "stage 0 has no ZeRO optimizer: the states stay on the GPU"
        yield Hit(path, config.get(*path), what, "set the stage to 1, 2 or 3, or remove `offload_optimizer`")


def _stage_3_only(config: Config, facts: Facts) -> Iterator[Hit]:
    if config.stage not in (0, 1, 2):
        return
    zero = config.section(_ZERO)
    on = [name for name in _NEEDS_STAGE_3 if config.on(_ZERO, name)]
    if (config.number(_ZERO, "zero_hpz_partition_size") or 1) > 1:
        on.append("zero_hpz_partition_size")
    for name in on:
        what = f"`{name}` is a stage 3 feature: at stage {config.stage} it does nothing"
        yield Hit((_ZERO, name), zero[name], what, "set the stage to 3, or remove it")


def _super_offload(config: Config, facts: Facts) -> Iterator[Hit]:
    path = (_ZERO, "offload_optimizer", "super_offload")
    if config.stage in (0, 1, 2) and config.on(*path):
        what = f"SuperOffload exists at stage 3 only: stage {config.stage} offloads the ordinary way"
        yield Hit(path, config.get(*path), what, "set the stage to 3, or remove it")


def _stage_3_keys(config: Config, facts: Facts) -> Iterator[Hit]:
    if config.stage not in (0, 1, 2):
        return
    for name, value in config.section(_ZERO).items():
        if name.startswith("stage3_"):
            what = f"`{name}` has no meaning at stage {config.stage}"
            yield Hit((_ZERO, name), value, what, "remove it, or set the stage to 3")


def _nvme_path(config: Config, facts: Facts) -> Iterator[Hit]:
    for what in ("offload_optimizer", "offload_param"):
        path = (_ZERO, what, "nvme_path")
        if config.offload_device(what) == "nvme" and not config.get(*path):
            message = 'the device is "nvme" and no folder is given'
            yield Hit(path, config.get(*path), message, "add `nvme_path`: a folder on a local NVMe drive")


def _nvme_stage(config: Config, facts: Facts) -> Iterator[Hit]:
    path = (_ZERO, "offload_optimizer", "device")
    if config.stage in (1, 2) and config.offload_device("offload_optimizer") == "nvme":
        what = f"stage {config.stage} cannot swap to NVMe: the states are kept in CPU memory instead"
        yield Hit(path, "nvme", what, 'set the stage to 3, or the device to "cpu"')


def _ratio(config: Config, facts: Facts) -> Iterator[Hit]:
    path = (_ZERO, "offload_optimizer", "ratio")
    ratio = config.number(*path)
    stage = 0 if config.stage is None else config.stage
    if ratio is not None and 0 <= ratio < 1 and stage != 3:
        what = f"a partial offload ({shown(ratio)}) exists at stage 3 only"
        yield Hit(path, ratio, what, "remove `ratio`, or set the stage to 3")


def _gather_on_save(config: Config, facts: Facts) -> Iterator[Hit]:
    names = ("stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save")
    old = "stage3_gather_fp16_weights_on_model_save"
    if config.stage != 3 or any(config.on(_ZERO, name) for name in (*names, old)):
        return
    path = (_ZERO, names[0])
    what = "save_model writes no weights that `transformers` can load, and the checkpoint twice"
    if config.offload_device("offload_optimizer") == "nvme":
        what = "saving stops with FileExistsError: the fallback writes the NVMe states twice"
    yield Hit(path, config.get(*path), what, "set it to true", (Edit("set", path, True),))


def _prefetch(config: Config, facts: Facts) -> Iterator[Hit]:
    overlap = config.on(_ZERO, "overlap_comm", default=True)
    if config.stage != 3 or not overlap:
        return
    for name in ("stage3_prefetch_bucket_size", "prefetch_bucket_size"):
        if config.number(_ZERO, name) == 0:
            what = "prefetch is off while `overlap_comm` is on: every layer waits for its parameters"
            yield Hit((_ZERO, name), 0, what, 'write "auto", or about 0.9 x hidden size squared')


def _sub_group(config: Config, facts: Facts) -> Iterator[Hit]:
    size = config.number(_ZERO, "sub_group_size")
    if config.stage == 3 and size == 0:
        what = "0 makes every parameter a group of its own: one optimizer call (and one NVMe read) each"
        yield Hit((_ZERO, "sub_group_size"), size, what, "remove it (the default is 1e9), or write 1e8")


def _live_parameters(config: Config, facts: Facts) -> Iterator[Hit]:
    if config.stage != 3:
        return
    for name in ("stage3_max_live_parameters", "stage3_max_reuse_distance"):
        if config.number(_ZERO, name) == 0:
            what = "0 drops every layer at once, so that backward gathers it a second time"
            yield Hit((_ZERO, name), 0, what, "remove it (the default is 1e9)")


def _zenflow(config: Config, facts: Facts) -> Iterator[Hit]:
    if not isinstance(config.zero("zenflow"), dict):
        return
    path = (_ZERO, "zenflow")
    if config.stage in (1, 2, 3) and config.offload_device("offload_optimizer") != "cpu":
        yield Hit(path, config.get(*path), "ZenFlow works on an optimizer that is offloaded to the CPU")
    elif config.stage == 0:
        yield Hit(path, config.get(*path), "ZenFlow needs ZeRO stage 1, 2 or 3", "set the stage to 2")


def _grad_norm(config: Config, facts: Facts) -> Iterator[Hit]:
    path = (_ZERO, "compute_grad_norm")
    value = config.get(*path, default=True)
    if value != "auto" and not config.on(*path, default=True) and config.stage in (None, 0, 3):
        yield Hit(path, value, "exists at stages 1 and 2 only", "remove it", (Edit("remove", path),))


def _grad_norm_and_clipping(config: Config, facts: Facts) -> Iterator[Hit]:
    path = (_ZERO, "compute_grad_norm")
    if config.on(*path, default=True) or config.stage not in (1, 2):
        return
    clipping = config.get("gradient_clipping", default=1.0)
    offloaded = config.offload_device("offload_optimizer")
    if offloaded or config.has(_ZERO, "zenflow") or (clipping != "auto" and clipping not in (0, None)):
        why = "optimizer offload" if offloaded else "gradient clipping (1.0 where it is not set to 0)"
        yield Hit(path, config.get(*path), f"the norm is needed for {why}", "remove it")


def _legacy_stage_1(config: Config, facts: Facts) -> Iterator[Hit]:
    path = (_ZERO, "legacy_stage1")
    if config.stage in (1, 2, 3) and config.on(*path):
        yield Hit(path, True, "the old stage 1 was removed", "remove it", (Edit("remove", path),))


def _legacy_format(config: Config, facts: Facts) -> Iterator[Hit]:
    value = config.get(_ZERO)
    if isinstance(value, bool):
        what = f"true and false are the old spelling of stage {int(value)}"
        new = {"stage": int(value)}
        yield Hit((_ZERO,), value, what, f"write {shown(new)}", (Edit("set", (_ZERO,), new),))


def _predivide(config: Config, facts: Facts) -> Iterator[Hit]:
    if config.stage not in (2, 3) or not config.on(_ZERO, "reduce_scatter", default=True):
        return
    factor = config.number("gradient_predivide_factor")
    if config.get("prescale_gradients") not in (None, False, 0, ""):
        what = f"stage {config.stage} reduces by scatter, which cannot scale before the sum"
        yield Hit(("prescale_gradients",), config.get("prescale_gradients"), what, "remove it")
    elif factor is not None and factor != 1:
        what = f"stage {config.stage} reduces by scatter, which cannot divide before the sum"
        yield Hit(("gradient_predivide_factor",), factor, what, "remove it")


def _sum(config: Config, facts: Facts) -> Iterator[Hit]:
    value = config.text("gradient_allreduce_op")
    if value is None or value.lower() != "sum":
        return
    deepcompile = config.on("compile", "deepcompile")
    if config.stage == 3 or isinstance(config.zero("zenflow"), dict) or deepcompile:
        what = '"sum" is not supported with ZeRO stage 3, ZenFlow or DeepCompile'
        yield Hit(("gradient_allreduce_op",), value, what, 'write "mean"')


def _optimizer_names(config: Config, facts: Facts) -> Iterator[Hit]:
    name = config.text("optimizer", "type")
    known = schema.load()
    if not name or name == "auto" or name.lower() in known["optimizers"]:
        return
    if name not in known["torch_optimizers"]:
        gone = "1-bit optimizers were removed; " if "bit" in name.lower() or "zeroone" in name.lower() else ""
        what = f"{gone}`{name}` is an optimizer of neither DeepSpeed nor torch.optim"
        yield Hit(("optimizer", "type"), name, what, "write AdamW, Adam, Lion, Adagrad, Lamb, Muon or SGD")


def _untested(config: Config, facts: Facts) -> Iterator[Hit]:
    name = config.text("optimizer", "type")
    tested = (
        "adam",
        "adamw",
        "adagrad",
        "lamb",
        "lion",
        "muadam",
        "muadamw",
        "musgd",
        "muon",
        "Adam",
        "AdamW",
    )
    if not name or name.lower() in tested or name not in schema.load()["torch_optimizers"]:
        return
    if config.stage in (1, 2, 3) and not config.get("zero_allow_untested_optimizer"):
        what = f"ZeRO refuses `{name}` until it is allowed to"
        edit = Edit("set", ("zero_allow_untested_optimizer",), True)
        yield Hit(("optimizer", "type"), name, what, 'add "zero_allow_untested_optimizer": true', (edit,))


def _max_grad_norm(config: Config, facts: Facts) -> Iterator[Hit]:
    path = ("optimizer", "params", "max_grad_norm")
    if config.has(*path) and config.text("optimizer", "type"):
        what = "DeepSpeed clips by `gradient_clipping` and refuses this key"
        yield Hit(path, config.get(*path), what, "move the number to `gradient_clipping`")


def _muon(config: Config, facts: Facts) -> Iterator[Hit]:
    name = config.text("optimizer", "type") or ""
    if name.lower() == "muon" and config.stage == 3 and config.on(_ZERO, "reduce_scatter", default=True):
        what = "Muon at stage 3 needs whole gradients"
        path = (_ZERO, "reduce_scatter")
        fix = 'add "reduce_scatter": false'
        yield Hit(path, config.get(*path), what, fix, (Edit("set", path, False),))


def _scheduler(config: Config, facts: Facts) -> Iterator[Hit]:
    name = config.text("scheduler", "type")
    known = schema.load()
    if not name or name in known["torch_schedulers"]:
        return
    if name not in known["schedulers"]:
        what = f"`{name}` is a schedule of neither DeepSpeed nor torch"
        yield Hit(("scheduler", "type"), name, what, f"write {', '.join(known['schedulers'])}")
        return
    for parameter, value in config.section("scheduler", "params").items():
        if parameter not in known["schedulers"][name]:
            path = ("scheduler", "params", parameter)
            yield Hit(path, value, f"{name} takes no `{parameter}`", f"it takes {_list(known, name)}")


def _list(known: dict, name: str) -> str:
    return ", ".join(known["schedulers"][name][:-1])


RULES = (
    Rule(
        "offload-param-below-stage-3",
        "error",
        WRONG,
        "out of memory although parameters are offloaded; no message",
        "Only stage 3 partitions parameters, so only it can offload them. Stage 2 accepts the block and ignores it.",
        "Set the stage to 3, or remove `offload_param`.",
        _offload_param,
    ),
    Rule(
        "offload-optimizer-at-stage-0",
        "error",
        WRONG,
        "out of memory although the optimizer is offloaded; or only a slower optimizer",
        "Stage 0 is plain data parallelism: there is no ZeRO optimizer whose states could be offloaded.",
        "Set the stage to 1, 2 or 3.",
        _offload_optimizer,
    ),
    Rule(
        "needs-stage-3",
        "error",
        WRONG,
        "ZeRO++ brings no speed; no message",
        "Quantised weights and gradients and hpZ belong to stage 3; lower stages do not read them.",
        "Set the stage to 3.",
        _stage_3_only,
    ),
    Rule(
        "super-offload-below-stage-3",
        "error",
        WRONG,
        "SuperOffload brings no speed; no message",
        "`super_offload` is read at stage 3 only.",
        "Set the stage to 3.",
        _super_offload,
    ),
    Rule(
        "stage-3-key-below-stage-3",
        "warning",
        COSTS,
        "none: the keys are dead weight",
        "`stage3_...` keys belong to stage 3.",
        "Remove them.",
        _stage_3_keys,
    ),
    Rule(
        "nvme-without-path",
        "error",
        FAILS_LATER,
        '"TypeError: unsupported operand type(s)", "expected str, bytes or os.PathLike object, not NoneType"',
        "The config class takes NVMe without a folder; the swapper fails when it wants to make one.",
        "Add `nvme_path`.",
        _nvme_path,
    ),
    Rule(
        "nvme-below-stage-3",
        "error",
        WRONG,
        "host memory runs out although the optimizer is on NVMe; no message",
        "Only stage 3 swaps optimizer states. Stages 1 and 2 read every offload device as CPU.",
        "Set the stage to 3.",
        _nvme_stage,
    ),
    Rule(
        "ratio-below-stage-3",
        "error",
        REJECTED,
        '"Partial offloading only supported for ZeRO Stage 3."',
        "Partial offload (Twin-Flow) belongs to stage 3.",
        "Remove `ratio`.",
        _ratio,
    ),
    Rule(
        "no-gather-on-save",
        "warning",
        WRONG,
        '"stage3_gather_16bit_weights_on_model_save=false. Saving the full checkpoint instead"; tensors of '
        'shape [0] when loaded; with NVMe "FileExistsError: .../offloaded_tensors/rank00"',
        "At stage 3 no rank has whole weights. Unless they are gathered, a save holds DeepSpeed's shards only.",
        "Set `stage3_gather_16bit_weights_on_model_save` to true; rank 0 needs host memory for the whole model.",
        _gather_on_save,
    ),
    Rule(
        "prefetch-off",
        "warning",
        COSTS,
        "stage 3 is slow; GPUs wait for parameters",
        "A prefetch bucket of 0 elements holds nothing, so no gather runs ahead of the layer that needs it.",
        'Write "auto".',
        _prefetch,
    ),
    Rule(
        "sub-group-size-0",
        "warning",
        COSTS,
        "the optimizer step of stage 3 is slow",
        "The parameters are cut into groups of at least this many elements; 0 makes one group per parameter.",
        "Remove it, or write 1e8 with NVMe.",
        _sub_group,
    ),
    Rule(
        "live-parameters-0",
        "warning",
        COSTS,
        "stage 3 is slow",
        "A budget of 0 live parameters releases each layer at once.",
        "Remove it unless memory is short by one layer.",
        _live_parameters,
    ),
    Rule(
        "zenflow-without-offload",
        "error",
        FAILS_LATER,
        '"Zenflow must be used with cpu offload"',
        "ZenFlow splits the work between a GPU optimizer and one that is offloaded.",
        'Add "offload_optimizer": {"device": "cpu"}.',
        _zenflow,
    ),
    Rule(
        "grad-norm-off",
        "error",
        REJECTED,
        '"compute_grad_norm=false is supported only with ZeRO Stage 1 or 2"',
        "Stage 0 and 3 always compute the norm.",
        "Remove it.",
        _grad_norm,
    ),
    Rule(
        "grad-norm-off-but-needed",
        "error",
        FAILS_LATER,
        '"zero_optimization.compute_grad_norm=false requires gradient_clipping=0"',
        "Clipping needs the norm, and clipping at 1.0 is DeepSpeed's default.",
        'Remove it, or write "gradient_clipping": 0.',
        _grad_norm_and_clipping,
    ),
    Rule(
        "legacy-stage-1",
        "error",
        FAILS_LATER,
        '"The deprecated version of ZeRO Stage 1 is not supported in deepspeed >= 0.5.9"',
        "The old implementation is gone; the key is still accepted.",
        "Remove it.",
        _legacy_stage_1,
    ),
    Rule(
        "legacy-zero-format",
        "warning",
        COSTS,
        '"this format of ZeRO optimization setup is deprecated"',
        "Before stages existed the section was a switch.",
        'Write {"stage": 1}.',
        _legacy_format,
    ),
    Rule(
        "scaling-before-scatter",
        "error",
        FAILS_LATER,
        '"pre-scale gradients is not yet supported with ZeRO-2 with reduce scatter enabled"',
        "Reduce-scatter divides after the sum.",
        "Remove the key.",
        _predivide,
    ),
    Rule(
        "sum-of-gradients",
        "error",
        REJECTED,
        "\"gradient_allreduce_op='sum' is not supported with ZeRO stage 3\"",
        "Stage 3, ZenFlow and DeepCompile know the mean only.",
        'Write "mean".',
        _sum,
    ),
    Rule(
        "unknown-optimizer",
        "error",
        FAILS_LATER,
        '"OneBitAdam is not a supported DeepSpeed Optimizer"',
        "The name is looked up when the engine is built: in DeepSpeed's list, then in torch.optim.",
        "Write a name that exists.",
        _optimizer_names,
    ),
    Rule(
        "untested-optimizer",
        "error",
        FAILS_LATER,
        '"You are using an untested ZeRO Optimizer. Please add <"zero_allow_untested_optimizer": true>"',
        "ZeRO was tested with DeepSpeed's own optimizers and Adam; others have to be allowed.",
        'Add "zero_allow_untested_optimizer": true.',
        _untested,
    ),
    Rule(
        "max-grad-norm-in-optimizer",
        "error",
        FAILS_LATER,
        "\"'max_grad_norm' is not supported as an optimizer parameter\"",
        "Clipping is the engine's task.",
        "Use `gradient_clipping`.",
        _max_grad_norm,
    ),
    Rule(
        "muon-at-stage-3",
        "error",
        FAILS_LATER,
        '"Muon and reduce scatter cannot be used together"',
        "Muon orthogonalises whole matrices, so a rank needs the whole gradient.",
        'Add "reduce_scatter": false.',
        _muon,
    ),
    Rule(
        "unknown-scheduler",
        "error",
        FAILS_LATER,
        '"DeepSpeed does not recognize LR scheduler ...", "got an unexpected keyword argument"',
        "The schedule is built by name, with `params` as its arguments.",
        "Use a schedule and parameters that exist.",
        _scheduler,
    ),
)
