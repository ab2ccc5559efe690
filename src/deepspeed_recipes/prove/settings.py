"""The settings that the plain loop and the compared run share, and a run's recipe: seconds long, and exact in fp32."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..recipe.project import CONFIGS
from ..recipe.recipe import Data, Model, Recipe, Schedule, Wandb


@dataclass(frozen=True)
class Settings:
    """Settings of the reference and the run under test, and the mistakes that a test must detect."""

    steps: int = 6
    learning_rate: float = 1e-2
    weight_decay: float = 0.1
    clip: float = 1.0
    epsilon: float = 1e-5
    """Adam's epsilon. Adam divides each gradient by its size plus epsilon: where a gradient is as small as that, its
    rounding error moves the weight like a gradient of size one. At 1e-8 plain PyTorch in fp32 disagrees with itself in
    fp64 (`test_the_reference_is_exact_enough`), so nothing could be compared with it; at 1e-5 it agrees."""
    router_aux_loss_coef: float = 0.0
    """Weight of an MoE model's load-balancing loss: the mean over conversations of each one's own, padding included."""
    mean_of_means: bool = False
    """Mistake: every conversation has the same weight, however long its answer is."""
    decay_everything: bool = False
    """Mistake: norms are decayed like matrices."""
    learn_prompts: bool = False
    """Mistake: the user's words are in the loss."""
    scaled_experts: float = 1.0
    """Mistake, unless 1: the factor by which the gradients of an MoE model's experts are too large."""


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
