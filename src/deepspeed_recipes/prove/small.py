"""The recipe that is trained for a proof: takes seconds, is exact in fp32, and is changed by keyword arguments."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from ..recipe.project import CONFIGS
from ..recipe.recipe import Data, Model, Recipe, Schedule, Wandb
from .settings import Settings


def small(model: Path, data: Path, /, deepspeed: str = "zero0.json", **changes: Any) -> Recipe:
    """Return a recipe for `model` on `data` with everything that costs time or noise turned off."""
    recipe = Recipe(
        family="tiny",
        size="3m",
        variant="full",
        model=Model(path=str(model)),
        data=Data(path=str(data)),
        deepspeed=str(CONFIGS / deepspeed),
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


def of_settings(settings: Settings, model: Path, data: Path, deepspeed: str, /, **changes: Any) -> Recipe:
    """Return the recipe of the settings on a dataset of eight examples, with all of them in every step."""
    common: dict[str, Any] = {
        "learning_rate": settings.learning_rate,
        "weight_decay": settings.weight_decay,
        "adam_epsilon": settings.epsilon,
        "max_grad_norm": settings.clip,
        "max_steps": settings.steps,
        "global_batch_size": 8,
    }
    return small(model, data, deepspeed, **common | changes)
