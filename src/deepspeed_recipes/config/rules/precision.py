"""Rules about precision: bf16, fp16, master weights, loss scale; and activation checkpointing."""

import math
from collections.abc import Iterator

from ..rule import FAILS_LATER, REJECTED, WRONG, Config, Edit, Facts, Hit, rule, shown


def _bf16(config: Config) -> str:
    return "bf16" if config.get("bf16") is not None or not config.has("bfloat16") else "bfloat16"


@rule("fp16-and-bf16", "error", REJECTED)
def _both(config: Config, facts: Facts) -> Iterator[Hit]:
    name = _bf16(config)
    if config.on(name, "enabled") and config.on("fp16", "enabled"):
        what = f"`fp16` and `{name}` are both on"
        yield Hit(("fp16", "enabled"), True, what, "switch one of them off")


@rule("master-weights", "error", REJECTED)
def _master_weights(config: Config, facts: Facts) -> Iterator[Hit]:
    name = _bf16(config)
    keys = (
        ("fp16", "fp16_master_weights_and_grads"),
        (name, "bf16_master_weights_and_grads"),
        (name, "bf16_optimizer_states"),
    )
    for path in keys:
        if config.on(*path) and config.stage in (None, 0):
            yield Hit(path, config.get(*path), "needs ZeRO stage 1, 2 or 3", "set the stage, or remove it")
    path = (name, "bf16_optimizer_states")
    if config.on(*path) and not config.on(name, "bf16_master_weights_and_grads"):
        what = "bf16 optimizer states need bf16 master weights"
        yield Hit(path, config.get(*path), what, 'add "bf16_master_weights_and_grads": true')


@rule("master-weights-without-offload", "error", FAILS_LATER)
def _master_weights_offload(config: Config, facts: Facts) -> Iterator[Hit]:
    if config.stage not in (1, 2, 3) or config.offload_device("offload_optimizer"):
        return
    name = _bf16(config)
    path = (name, "bf16_master_weights_and_grads")
    if config.on(*path) and not config.on(name, "bf16_optimizer_states"):
        what = "bf16 master weights with fp32 states need an optimizer that is offloaded to the CPU"
        yield Hit(path, True, what, 'add "bf16_optimizer_states": true, or offload the optimizer')
    path = ("fp16", "fp16_master_weights_and_grads")
    if config.on(*path):
        yield Hit(path, True, "fp16 master weights need an optimizer that is offloaded to the CPU")


@rule("overflow-unchecked", "warning", WRONG)
def _overflow(config: Config, facts: Facts) -> Iterator[Hit]:
    path = (_bf16(config), "check_grad_overflow")
    if config.has(*path) and config.get(*path) != "auto" and not config.on(*path, default=True):
        what = "a step with infinite gradients is applied, and Adam's states become NaN for good"
        yield Hit(path, config.get(*path), what, "remove it", (Edit("remove", path),))


@rule("step-of-zeros", "warning", WRONG)
def _step_of_zeros(config: Config, facts: Facts) -> Iterator[Hit]:
    if config.stage != 0:
        return
    for name in (_bf16(config), "fp16"):
        path = (name, "enabled")
        on, filled = config.on(*path), config.get(*path) == "auto" and facts.trainer == "hf"
        staged = name != "fp16" and facts.pipeline_stages > 1  # whose optimizer is another
        if (on or filled) and not staged:
            when = "" if on else "in 16 bits "
            what = f"{when}DeepSpeed makes a step with gradients of zero first, so Adam's first updates are too small"
            yield Hit(path, config.get(*path), what)
            return


@rule("fp16-without-zero", "error", WRONG)
def _fp16_without_zero(config: Config, facts: Facts) -> Iterator[Hit]:
    if config.stage == 0 and config.on("fp16", "enabled"):
        what = "without ZeRO, gradients are divided by a loss scale that the loss was not multiplied by"
        yield Hit(("fp16", "enabled"), True, what, "set the stage to 1")


@rule("loss-scale", "error", REJECTED)
def _loss_scale(config: Config, facts: Facts) -> Iterator[Hit]:
    scale = config.get("fp16", "loss_scale", default=0)
    number = _number(scale)
    if scale != "auto" and (isinstance(scale, bool) or number is None or number < 0 or not math.isfinite(number)):
        fix = "write 0 for a dynamic scale, or a number above 0"
        yield Hit(("fp16", "loss_scale"), scale, f"{shown(scale)} is not a loss scale", fix)
        return
    for name in ("loss_scale_window", "min_loss_scale"):
        value = config.get("fp16", name, default=1)
        if isinstance(value, bool):
            yield Hit(("fp16", name), value, f"{shown(value)} is not a number", "write a whole number above 0")
        dynamic = config.on("fp16", "enabled") and number in (0, None)
        size = _number(value)
        if dynamic and not isinstance(value, bool) and size is not None and size < 1:
            yield Hit(("fp16", name), value, "a dynamic loss scale needs at least 1", "remove it")


@rule("initial-scale-power", "error", FAILS_LATER)
def _scale_power(config: Config, facts: Facts) -> Iterator[Hit]:
    path = ("fp16", "initial_scale_power")
    power = _number(config.get(*path, default=16))
    enabled = config.get("fp16", "enabled", default=False)
    if (enabled == "auto" or config.on("fp16", "enabled")) and power is not None and power > 63:
        what = f"the first loss scale is 2^{power:g}, which torch cannot multiply with"
        yield Hit(path, config.get(*path), what, "remove it (the default is 16)")


def _number(value: object) -> float | None:
    try:
        return float(value) if isinstance(value, (int, float, str)) else None
    except ValueError:
        return None


@rule("accumulation-type-at-stage-0", "error", FAILS_LATER)
def _accumulate(config: Config, facts: Facts) -> Iterator[Hit]:
    dtype = config.get("data_types", "grad_accum_dtype")
    low = config.on(_bf16(config), "enabled") or config.on("fp16", "enabled")
    if config.stage == 0 and low and isinstance(dtype, str) and dtype in ("fp32", "float32", "float"):
        what = "stage 0 accumulates gradients in the precision of the parameters"
        path = ("data_types", "grad_accum_dtype")
        yield Hit(path, dtype, what, "set the stage to 1, or remove it")


@rule("activation-checkpointing-unused", "warning", WRONG)
def _checkpointing(config: Config, facts: Facts) -> Iterator[Hit]:
    if facts.trainer == "hf" and any(config.section("activation_checkpointing").values()):
        path = ("activation_checkpointing",)
        what = "the section affects only models that call deepspeed.checkpointing; Hugging Face models do not"
        yield Hit(path, config.get(*path), what, "set gradient_checkpointing=True in TrainingArguments")
