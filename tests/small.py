"""The recipe that tests run, and DeepSpeed files that differ from those of configs/ in a few keys."""

from pathlib import Path
from typing import Any

from recipes.proof.small import small
from recipes.spec.project import CHECKOUT as ROOT
from recipes.spec.run_folder import read_json, write_json

__all__ = ["in_sub_groups", "small", "with_zero"]


def with_zero(folder: Path, deepspeed: str, **keys: Any) -> str:
    """Write a copy of a configuration with other keys of `zero_optimization`, and return its path."""
    config = read_json(ROOT / "configs" / deepspeed)
    path = folder / deepspeed
    write_json(path, config | {"zero_optimization": config["zero_optimization"] | keys})
    return str(path)


def in_sub_groups(folder: Path) -> str:
    """Return ZeRO-3's configuration for an optimizer that steps a few parameters at a time, as large models' does."""
    return with_zero(folder, "zero3.json", sub_group_size=1000)
