"""A DeepSpeed JSON as one frozen value, read once and passed to every function that depends on it.

The linter (`config`) checks a file key by key; a `DeepSpeedFile` holds what the rest of the project reads from a file
that has passed the linter.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .errors import NotJson, UserError
from .files import Json, JsonView
from .run_folder import read_json

Device = Literal["none", "cpu", "nvme"]


KEPT_WEIGHTS = 1_000_000_000
"""The value of `DeepSpeedFile.kept_weights` with DeepSpeed's defaults."""
GATHERS = "stage3_gather_16bit_weights_on_model_save"
"""The key of `DeepSpeedFile.gathers_weights`; its old name has `fp16` in place of `16bit`."""
SWAPPED = 100_000_000
"""DeepSpeed's default `offload_param.buffer_size`."""
PREFETCHED = 50_000_000
"""DeepSpeed's default `stage3_prefetch_bucket_size`: 100 MB in bf16, large enough that latency no longer matters."""


@dataclass(frozen=True)
class DeepSpeedFile:
    """The values of a DeepSpeed configuration, with DeepSpeed's defaults for missing keys and `auto`."""

    name: str = ""
    """The file's name, for messages."""
    content: JsonView = field(default_factory=dict, compare=False)
    """The whole JSON; do not modify it."""
    stage: int = 0
    """ZeRO stage."""
    partition_size: int = 1
    """`zero_hpz_partition_size`: number of ranks that together hold a second copy of the parameters (stage 3)."""
    kept_weights: int = KEPT_WEIGHTS
    """Largest number of weights that ZeRO-3 still holds whole at the end of the forward pass, and does not gather again
    for the backward pass."""
    offload_optimizer: Device = "none"
    """Stages 1 to 3."""
    offload_parameters: Device = "none"
    """Stage 3."""
    tensor_size: int = 1
    """`tensor_parallel.autotp_size`."""
    sequence_size: int = 1
    """`sequence_parallel_size`."""
    expert_size: int = 1
    """`expert_parallel.autoep_size`, where the block is enabled."""
    has_tensor_block: bool = False
    has_expert_block: bool = False
    """True if there is an `expert_parallel` block, which then receives the layout's size."""
    optimizer: str | None = None
    """The type in the `optimizer` block, or None if the Trainer creates the optimizer."""
    has_zenflow: bool = False
    super_offload: bool = False
    """`offload_optimizer.super_offload`, which DeepSpeed reads at stage 3."""
    deepcompile: bool = False
    """`compile.deepcompile`, which does nothing until the engine compiles the model (the Trainer's `torch_compile`)."""
    compiled_passes: tuple[str, ...] = ()
    """`compile.passes`: names of DeepCompile's passes over the graph; empty for the default of the ZeRO stage."""
    gathers_weights: bool = True
    """True if checkpoints hold Hugging Face weights: under ZeRO-3, if `GATHERS` is not false."""

    @property
    def zero(self) -> JsonView:
        """The `zero_optimization` block."""
        return _block(self.content, "zero_optimization")


def parse(content: JsonView, name: str = "") -> DeepSpeedFile:
    """Return the values of a DeepSpeed configuration."""
    zero, tensor = _block(content, "zero_optimization"), _block(content, "tensor_parallel")
    expert = _block(content, "expert_parallel")
    switch = content.get("zero_optimization")  # true and false are the old spelling of stages 1 and 0
    passes = _block(content, "compile").get("passes")
    given = 2 if zero.get("stage") == "auto" else zero.get("stage")  # by accelerate, which starts the engine
    stage = int(switch) if isinstance(switch, bool) else _number(given, 0)
    # DeepSpeed keeps a weight that it uses again within `stage3_max_reuse_distance` elements, and half of this distance
    # lies before the end of the model, since the backward pass starts with the last weights. It also gathers ahead, at
    # least one matrix at each module, up to `stage3_max_live_parameters`. A layer has more modules than matrices, so
    # the prefetch reaches this limit, and weights that are still whole when the backward pass reaches them are kept
    # (deepspeed 0.19.8, runtime/zero/partitioned_param_coordinator.py; measured in tests/test_profile.py).
    reuse = _number(zero.get("stage3_max_reuse_distance"), KEPT_WEIGHTS)
    live = _number(zero.get("stage3_max_live_parameters"), KEPT_WEIGHTS)
    prefetched = live if zero.get("stage3_prefetch_bucket_size") != 0 else 0
    return DeepSpeedFile(
        name=name,
        content=content,
        stage=stage,
        partition_size=_number(zero.get("zero_hpz_partition_size"), 1) if stage == 3 else 1,
        kept_weights=max(reuse // 2, prefetched),
        offload_optimizer=_device(zero, "offload_optimizer") if stage >= 1 else "none",
        offload_parameters=_device(zero, "offload_param") if stage == 3 else "none",
        tensor_size=_number(tensor.get("autotp_size"), 1),
        sequence_size=_number(content.get("sequence_parallel_size"), 1),
        expert_size=_number(expert.get("autoep_size"), 1) if expert.get("enabled") else 1,
        has_tensor_block="tensor_parallel" in content,
        has_expert_block="expert_parallel" in content,
        optimizer=_block(content, "optimizer").get("type"),
        has_zenflow="zenflow" in zero,
        super_offload=stage == 3 and _block(zero, "offload_optimizer").get("super_offload") is True,
        deepcompile=_block(content, "compile").get("deepcompile") is True,
        compiled_passes=tuple(map(str, passes)) if isinstance(passes, list) else (),
        gathers_weights=stage < 3 or bool(zero.get(GATHERS, zero.get(GATHERS.replace("16bit", "fp16"), True))),
    )


def prefetch_size(hidden: int, layer: int) -> int:
    """Return the number of elements that ZeRO-3 prefetches in one message if the file has "auto".

    It is one decoder layer of `layer` weights, up to `PREFETCHED`. transformers' value, 0.9 of the hidden size squared,
    is smaller than most matrices, so that these are gathered one by one (8 layers of width 512: 113 instead of 74
    all-gathers per step, with the same bytes; measured on two CPU ranks). How far ahead ZeRO-3 gathers depends on
    `stage3_max_live_parameters` instead.
    """
    return max(int(0.9 * hidden**2), min(layer, PREFETCHED))


def fill_prefetch(content: Json, hidden: int, layer: int) -> None:
    """Replace an "auto" prefetch size in a configuration with `prefetch_size`."""
    zero = content.get("zero_optimization")
    if isinstance(zero, dict) and zero.get("stage3_prefetch_bucket_size") == "auto":
        zero["stage3_prefetch_bucket_size"] = prefetch_size(hidden, layer)


def swap_buffer_size(shard: int) -> int:
    """Return the elements of a buffer for a rank's part of a weight: as many, and a hundredth more."""
    return shard + shard // 100


def fill_swap_buffer(content: Json, shard: int) -> None:
    """Set the size of the buffers through which weights are read from NVMe, unless the configuration has one.

    DeepSpeed reads a rank's part of a weight into one buffer, of 100 million elements by default, and fails if that is
    too small; `shard` is the largest part.
    """
    offload = _block(_block(content, "zero_optimization"), "offload_param")
    if isinstance(offload, dict) and offload.get("device") == "nvme" and shard > SWAPPED:
        offload.setdefault("buffer_size", swap_buffer_size(shard))


def with_zero(file: DeepSpeedFile, **changes: object) -> DeepSpeedFile:
    """Return a copy of the file with changed values in its `zero_optimization` block."""
    return parse({**file.content, "zero_optimization": {**file.zero, **changes}}, file.name)


def read(path: Path | str) -> DeepSpeedFile:
    """Return the values of the DeepSpeed JSON file at `path`."""
    try:
        content = read_json(Path(path))
    except NotJson as error:
        fix = f"ds-recipes check {path} lists what is wrong; with --fix it repairs commas and Python's words."
        raise UserError(f"{error}\n{fix}") from None
    return parse(content, Path(path).name)


def _block(content: JsonView, name: str) -> JsonView:
    value = content.get(name)
    return value if isinstance(value, Mapping) else {}


def _number(value: Any, default: int) -> int:
    """Return a whole number, which typed sections also accept as text, or `default` for `auto` and other values."""
    try:
        return int(value)
    except (TypeError, ValueError):
        return default


SWITCHES = {"offload_optimizer": "cpu_offload", "offload_param": "cpu_offload_param"}
"""The old switches, which DeepSpeed reads as blocks with the device `cpu`."""


def _device(zero: JsonView, key: str) -> Device:
    device = _block(zero, key).get("device", "cpu" if zero.get(SWITCHES[key]) is True else "none")
    return device if device in ("cpu", "nvme") else "none"
