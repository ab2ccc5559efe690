"""The versions that this project works with, and the features that older versions lack.

tests/stacks has the environments at both ends of the ranges and one in between; `.github/workflows/nightly.yml` tests
them.
"""

import re
from dataclasses import dataclass
from pathlib import Path

RANGES = {
    "python": ("3.11", "3.13"),
    "torch": ("2.9", "2.13"),
    "deepspeed": ("0.19.0", "0.19.8"),
    "transformers": ("5.10", "5.22"),
    "accelerate": ("1.13", "1.15"),
    "peft": ("0.20", "0.21"),
    "trl": ("1.16", "1.16"),
    "datasets": ("5.2", "5.2"),
}
"""The oldest and the newest tested release of each package; a later patch of the newest counts as tested."""

LAYOUTS = {
    "pipeline": ("0.19.3", "divides gradients by the accumulation once per stage"),
    "tensor": ("0.19.6", "exports other weights than it trains"),
    "expert": ("0.19.7", "does not start with the parameter groups of experts, if it has AutoEP at all"),
}
"""The first DeepSpeed that trains and exports a layout like plain PyTorch, and the defect of older versions.

Measured by `doctor --prove` with 0.19.0, 0.19.3, 0.19.6, 0.19.7 and 0.19.8, and read in the sources of the others.
"""


@dataclass(frozen=True)
class Lack:
    """A feature that a package lacks before a version."""

    package: str
    before: str
    what: str
    since: str = "0"
    """The first version to which this entry applies; older versions have an entry of their own."""


LACKS = (
    Lack("torch", "2.10", "no variable-length attention kernel: packed sequences take FlexAttention"),
    Lack("torch", "2.11", "no sliding windows in the variable-length kernel: such models take FlexAttention", "2.10"),
    Lack(
        "torch",
        "2.13",
        "shared keys and values are repeated for the variable-length kernel, which takes memory",
        "2.11",
    ),
    *(Lack("deepspeed", first, f"layout.{key} is refused, since it {why}") for key, (first, why) in LAYOUTS.items()),
    Lack("deepspeed", "0.19.4", "the linter does not report keys that DeepSpeed has removed"),
    Lack("deepspeed", "0.19.8", "tensor parallelism is refused for models whose plan splits whole inputs"),
    Lack("transformers", "5.14", "nemotron_h's configurations cannot be read"),
    Lack(
        "transformers",
        "5.17",
        "training with pictures is refused where the processor does not report their placeholder text",
    ),
    Lack("transformers", "5.20", "conversations in which somebody wrote a control token are refused"),
)


def pins(file: Path) -> dict[str, str]:
    """Return the versions that a list of requirements pins, such as constraints.txt."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", file.read_text(encoding="utf-8"), re.MULTILINE))


def within(package: str, version: str) -> bool:
    """Return whether a version of a package is in the tested range."""
    oldest, newest = RANGES[package]
    parts = len(_numbers(newest))
    return _numbers(oldest) <= _numbers(version) and _numbers(version)[:parts] <= _numbers(newest)


def lacking(package: str, version: str) -> list[str]:
    """Return the features that a version of a package lacks."""
    known = _numbers(version)
    return [
        lack.what for lack in LACKS if lack.package == package and _numbers(lack.since) <= known < _numbers(lack.before)
    ]


def is_before(version: str, other: str) -> bool:
    """Return whether a version is older than another."""
    return _numbers(version) < _numbers(other)


def _numbers(version: str) -> tuple[int, ...]:
    """Return a version's numbers: (2, 9, 1) for 2.9.1+cpu."""
    return tuple(int(number) for number in re.split(r"[^\d.]", version)[0].strip(".").split("."))
