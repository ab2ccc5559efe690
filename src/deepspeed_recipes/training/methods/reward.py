"""Reward modelling on TRL's RewardTrainer: a model that gives each answer a number, higher for the better of two.

The loss is Bradley and Terry's, `-log sigmoid(chosen - rejected)` (Ouyang et al. 2022, arXiv:2203.02155, equation 1).
"""

import torch
from torch.nn.functional import logsigmoid
from trl import RewardConfig, RewardTrainer

from ...recipe.files import Json
from ...recipe.recipe import Recipe
from ..data.collate import Batch
from ..parallel import scores
from .averages import Averaging
from .preferences import PairHooks, datasets, of_pairs, ranked_by

__all__ = ["arguments", "datasets", "metric", "trainer"]


class RunRewardTrainer(Averaging, PairHooks, RewardTrainer):
    """TRL's trainer with the run's hooks."""

    def compute_loss(
        self, model: torch.nn.Module, inputs: Batch, *arguments: object, **options: object
    ) -> torch.Tensor:
        """Return the mean loss of a micro-batch, in nats, as TRL computes it but without reading from the device."""
        passed = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        chosen, rejected = model(**passed, use_cache=False).logits[:, 0].float().chunk(2)
        self.averages.add(of_pairs(chosen, rejected))
        return self.mean(-logsigmoid(chosen - rejected))


def arguments(common: Json, recipe: Recipe) -> RewardConfig:
    """Return TRL's arguments."""
    return RewardConfig(**common, max_length=recipe.sequence_length)


trainer = RunRewardTrainer.of
metric = ranked_by(scores.reward)
