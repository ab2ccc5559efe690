"""The recipe that tests run: takes seconds, is exact in fp32, and is changed by keyword."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from recipes.spec.project import CHECKOUT as ROOT
from recipes.spec.recipe import Data, Model, Recipe, Schedule, Wandb
from recipes.spec.run_folder import read_json, write_json


def small(model: Path, data: Path, deepspeed: str = "zero0.json", **changes: Any) -> Recipe:
    """Return a recipe for `model` on `data` with everything that costs time or noise turned off."""
    recipe = Recipe(
        family="tiny",
        size="3m",
        variant="full",
        method="sft",
        model=Model(path=str(model)),
        data=Data(path=str(data)),
        deepspeed=str(ROOT / "configs" / deepspeed),
        learning_rate=1e-2,
        weight_decay=0.1,
        max_steps=6,
        schedule=Schedule(kind="constant", warmup=0),
        global_batch_size=8,
        micro_batch_size=4,
        sequence_length=128,
        packing=False,
        precision="fp32",
        gradient_checkpointing=False,
        logging_steps=1,
        save_steps=0,
        wandb=Wandb(mode="disabled"),
    )
    return replace(recipe, **changes)


def with_zero(folder: Path, deepspeed: str, **keys: Any) -> str:
    """Write a copy of a configuration with other keys of `zero_optimization`, and return its path."""
    config = read_json(ROOT / "configs" / deepspeed)
    path = folder / deepspeed
    write_json(path, config | {"zero_optimization": config["zero_optimization"] | keys})
    return str(path)


def in_sub_groups(folder: Path) -> str:
    """Return ZeRO-3's configuration for an optimizer that steps a few parameters at a time, as large models' does."""
    return with_zero(folder, "zero3.json", sub_group_size=1000)
