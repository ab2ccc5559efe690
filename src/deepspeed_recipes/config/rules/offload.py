"""Rules about offload to the CPU and to NVMe, ZenFlow and SuperOffload."""

from collections.abc import Iterator

from ..rule import FAILS_LATER, REJECTED, WRONG, Config, Facts, Hit, rule, shown

_ZERO = "zero_optimization"


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
    if not isinstance(config.zero("zenflow"), dict):
        return
    path = (_ZERO, "zenflow")
    if config.stage in (1, 2, 3) and config.offload_device("offload_optimizer") != "cpu":
        yield Hit(path, config.get(*path), "ZenFlow needs an optimizer that is offloaded to the CPU")
    elif config.stage == 0:
        yield Hit(path, config.get(*path), "ZenFlow needs ZeRO stage 1, 2 or 3", "set the stage to 2")
