"""A machine's measured rates, from the file that `ds-recipes doctor --measure` writes, in place of datasheets."""

import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...recipe.errors import UserError
from ...recipe.files import JsonView
from ...recipe.run_folder import read_json
from .gpus import Gpu, find

VERSION = 1
"""Version of the file's format."""
HEAD_WIDTH = 128
"""Head width of the attention that is measured."""
NARROW_HEAD = 32
"""Head width of the second attention that is measured on a CPU."""
CPU = "CPU"
"""The device of a machine without GPUs."""
DIFFERENCES = ("layer ", "wide.", "parameter.")
"""Entries of `seconds` that may be 0, since they are the difference of two measurements."""


def median_of(found: Sequence[Any]) -> Any:
    """Return the median of numbers, or of each number in dictionaries with the same keys."""
    if isinstance(found[0], Mapping):
        return {name: median_of([one[name] for one in found]) for name in found[0]}
    import statistics  # a plan without a measured machine starts without it

    return statistics.median(found)


def default_file() -> Path:
    """Return where this machine's measurements are kept."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "deepspeed-recipes" / "machine.json"


@dataclass(frozen=True, eq=False)  # a key of caches
class Machine:
    """One node's measurements: medians over ranks that measured at the same time, in seconds."""

    file: Path
    date: str
    device: str
    """The driver's name for the GPU."""
    ranks: int
    sizes: JsonView
    """Sizes that were measured, as in `benchmarks.probe`."""
    seconds: JsonView
    alone: JsonView = field(default_factory=dict)
    """`seconds` of a single rank, on a machine without GPUs."""
    cores: int = 0
    host_memory_gib: float = 0.0
    nvme_gbs: float = 0.0
    """GB/s of its drives, the slower of reading and writing; 0 if not measured."""
    network_gbs: float = 0.0
    """GB/s from one node to the others, per direction, as reached by an all-reduce; 0 if not measured."""
    spread: float = 0.0
    """Standard deviation of the logarithm of its speed from one round of measurements to the next."""

    def has(self, gpu: Gpu) -> bool:
        """Return whether this machine's GPU is of the given kind."""
        try:
            return gpu.name in (self.device, find(self.device).name)
        except UserError:  # no GPU, or one without a datasheet
            return gpu.name == self.device

    def product_rates(self, dtype: str) -> list[tuple[int, float]]:
        """Return the operations per second of square products, by their side, the smallest first."""
        taken = {int(name.split()[0]): each for name, each in self.seconds["products"].items() if dtype in name}
        return [(side, 2 * side**3 / taken[side]) for side in sorted(taken)]

    @property
    def host_adam(self) -> float:
        """Parameters per second that Adam updates on the host, all ranks together; 0 if it was not measured."""
        taken = self.seconds.get("host_adam")
        return self.ranks * self.sizes["adam"] / taken if taken else 0.0

    def measured(self, gpu: Gpu) -> Gpu:
        """Return the GPU with the bandwidths that were measured instead of its datasheet's."""
        known = self.seconds
        changes = {"memory_gbs": 2 * self.sizes["copy"] / known["copy"] / 1e9}
        if "from_host" in known:
            changes["pcie_gbs"] = self.sizes["copy"] / max(known["from_host"], known["to_host"]) / 1e9
        if "all_reduce large" in known:
            changes["link_gbs" if gpu.link_gbs else "pcie_gbs"] = _ring_gbs(self.ranks, self.sizes, known)
        return replace(gpu, **changes)


def _ring_gbs(ranks: int, sizes: JsonView, seconds: JsonView) -> float:
    """Return the GB/s that an all-reduce sent over each link of the ring, or from each node to the next."""
    share = 2 * (ranks - 1) / ranks  # of the message
    return float(share * sizes["message"] / seconds["all_reduce large"] / 1e9)


def attention_operations(sizes: Mapping[str, float]) -> float:
    """Return the operations of the measured attention's forward pass, with its causal mask."""
    return 4 * sizes["heads"] * HEAD_WIDTH * sizes["length"] ** 2 / 2


def read(file: Path) -> Machine:
    """Return a machine's measurements.

    Raises:
        UserError: the file cannot be read, is another version's, or lacks something.
    """
    try:
        data = read_json(file)
    except UserError as error:
        raise UserError(f"{error} Measure again with doctor --measure.") from error
    if not isinstance(data, dict) or data.get("version") != VERSION:
        found = data.get("version") if isinstance(data, dict) else None
        raise UserError(f"{file}: version {found!r} is not {VERSION}; measure again with doctor --measure.")
    network = data.get("network")
    try:
        machine = Machine(
            file, str(data["date"]), str(data["device"]), int(data["ranks"]), data["sizes"], data["seconds"],
            data["alone"] if "alone" in data else data["seconds"], int(data["environment"]["cpu_count"]),
            float(data["environment"]["host_memory_gib"]), float(data.get("nvme_gbs", 0)),
            _ring_gbs(network["ranks"], data["sizes"], network["seconds"]) if network is not None else 0.0,
            float(data.get("spread", 0)),
        )  # fmt: skip
        if not 0 <= machine.spread < math.inf or machine.ranks < 1:
            raise ValueError(f"spread {machine.spread}, ranks {machine.ranks}")
        seconds = dict(_flat(machine.seconds))
        known = {*seconds, *(name for name, _ in _flat(machine.alone) if name.startswith("parameter."))}
        wrong = sorted(_needed(machine, seconds) - known)
        wrong = wrong or [
            name
            for name, taken in (*seconds.items(), *_flat(machine.alone))
            if not (0 < taken < math.inf or (taken == 0 and name.startswith(DIFFERENCES)))
        ]
        sizes = dict(_flat({**machine.sizes, "products": {}}))
        wrong += [name for name in ("copy", "length", "heads", "message", "adam") if not sizes[name] > 0]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"{file}: damaged ({error}); measure again with doctor --measure.") from error
    if wrong:
        raise UserError(f"{file}: seconds.{wrong[0]} is missing or no time; measure again with doctor --measure.")
    return machine


def _needed(machine: Machine, known: Collection[str]) -> set[str]:
    """Return the names that `cost.constants` reads, with a point before those of a part; `known` are those there."""
    products = [name.removeprefix("products.").split() for name in known if name.startswith("products.")]
    dtypes = {dtype for side, dtype in products if int(side) > 0}
    if "fp32" not in dtypes or not dtypes <= {"bf16", "fp32"}:
        raise ValueError(f"products of {', '.join(sorted(dtypes)) or 'no dtype'}")
    passes, stages = ("forward", "backward", "step"), ("plain", "zero1", "zero3")
    needed = {"copy", *(f"layer {stage}.{each}" for stage in stages for each in passes)}
    if machine.device != CPU:
        return needed | {name.replace(" forward", " both") for name in known if name.startswith("attention.")}
    needed |= {"layer plain fp32.forward", *(f"layer {stage}.rest {each}" for stage in stages for each in passes)}
    for dtype in dtypes:
        needed |= {f"wide.{dtype} forward", f"wide.{dtype} backward", f"parameter.{dtype} zero1 step"}
        needed |= {f"attention.{one} {dtype} {which}" for one in ("narrow", "flash_2") for which in ("forward", "both")}
        needed |= {f"parameter.{dtype} {stage} backward" for stage in stages}
        suffix = " fp32" if dtype == "fp32" else ""
        needed |= {f"all_gather {size}{suffix}" for size in ("large", "small") if machine.ranks > 1}
    return needed


def _flat(seconds: JsonView, prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in seconds.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", float(value)
