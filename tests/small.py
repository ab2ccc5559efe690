"""The recipe that tests run, DeepSpeed files that differ from those of configs/ in a few keys, and families."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed_recipes.planning.model_profile import decoders
from deepspeed_recipes.prove.techniques import small
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.run_folder import read_json, write_json
from tests import ROOT

__all__ = ["in_sub_groups", "language_families", "small", "with_zero"]


def with_zero(folder: Path, deepspeed: str, **keys: Any) -> str:
    """Write a copy of a configuration with other keys of `zero_optimization`, and return its path."""
    config = read_json(ROOT / "configs" / deepspeed)
    path = folder / deepspeed
    write_json(path, config | {"zero_optimization": config["zero_optimization"] | keys})
    return str(path)


def in_sub_groups(folder: Path) -> str:
    """Return ZeRO-3's configuration for an optimizer that steps a few parameters at a time, as large models' does."""
    return with_zero(folder, "zero3.json", sub_group_size=1000)


def in_round_robin(folder: Path) -> str:
    """Return ZeRO-2's configuration with the weights in another order than the model's, as LLaMA-Factory ships it."""
    return with_zero(folder, "zero2.json", round_robin_gradients=True)


def language_families() -> list[str]:
    """Return the families whose decoder is a language model of transformers too, not only a part of one that sees."""
    return [name for name in pages.families() if not any(map(decoders.is_stand_in, _configs(name)))]


def _configs(family: str) -> list[Mapping[str, Any]]:
    return [model.config for model in pages.page(family).SIZES.values()]
