"""A machine's measured rates, from the file that `ds-recipes doctor --measure` writes, in place of datasheets."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ...recipe.errors import UserError
from ...recipe.files import JsonView
from ...recipe.run_folder import read_json
from .gpus import Gpu, find

VERSION = 1
"""Of the file's format."""
HEAD_WIDTH = 128
"""Of the attention that is measured."""
NEEDED = ("products", "attention", "copy", "layer plain", "layer zero1", "layer zero3")
"""Entries of `seconds` that every file has."""


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
    """What the driver calls the GPU."""
    ranks: int
    sizes: Mapping[str, float]
    """Of what was measured, as `benchmarks.probe` has them."""
    seconds: JsonView
    nvme_gbs: float = 0.0
    """GB/s of its drives, the slower of reading and writing; 0: not measured."""

    def has(self, gpu: Gpu) -> bool:
        """Return whether this machine's GPU is of the given kind."""
        try:
            return gpu.name in (self.device, find(self.device).name)
        except UserError:  # no GPU, or one without a datasheet
            return gpu.name == self.device

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
            share = 2 * (self.ranks - 1) / self.ranks  # of the message that a ring sends over each link
            link = "link_gbs" if gpu.link_gbs else "pcie_gbs"
            changes[link] = share * self.sizes["message"] / known["all_reduce large"] / 1e9
        return replace(gpu, **changes)


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
    try:
        machine = Machine(
            file, str(data["date"]), str(data["device"]), int(data["ranks"]), data["sizes"], data["seconds"],
            float(data.get("nvme_gbs", 0)),
        )  # fmt: skip
        absent = [name for name in NEEDED if name not in machine.seconds]
        wrong = absent or [name for name, taken in _flat(machine.seconds) if not 0 <= taken < math.inf]
        wrong += [name for name in ("copy", "length", "heads", "message") if not machine.sizes[name] > 0]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file}: damaged ({error}); measure again with doctor --measure.") from error
    if wrong:
        raise UserError(f"{file}: seconds.{wrong[0]} is missing or no time; measure again with doctor --measure.")
    return machine


def _flat(seconds: JsonView, prefix: str = "") -> list[tuple[str, float]]:
    found = []
    for name, value in seconds.items():
        inner = _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(f"{prefix}{name}", float(value))]
        found += inner
    return found
