"""Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290), by TRL's DPOTrainer."""

from typing import Any

from trl import DPOConfig, DPOTrainer

from ...spec.recipe import Recipe
from ..parallel import scores
from .preferences.pairs import PairHooks, datasets, ranked_by
from .preferences.reference import with_reference

__all__ = ["arguments", "datasets", "metric", "trainer"]


class RunDPOTrainer(PairHooks, DPOTrainer):
    """TRL's trainer with the run's hooks."""


def arguments(common: dict[str, Any], recipe: Recipe) -> DPOConfig:
    """Return TRL's arguments."""
    dpo = {"loss_type": recipe.dpo.loss, "label_smoothing": recipe.dpo.label_smoothing, "beta": recipe.dpo.beta}
    return DPOConfig(**common, **dpo, max_length=recipe.sequence_length)


trainer = with_reference(RunDPOTrainer)
metric = ranked_by(scores.log_likelihood)
