"""ORPO: imitates the better answer and raises its odds above the worse one's, without a reference model.

Hong et al. 2024, arXiv:2403.07691. The odds ratio is that of TRL's ORPOTrainer; its inputs are computed here, in tiles,
since TRL's whole logits of two answers take gigabytes, and it reads a dozen numbers at every pass.
"""

import torch
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from ...recipe.files import Json
from ...recipe.methods import Orpo
from ...recipe.recipe import Recipe
from ..data.collate import Batch
from ..parallel import scores
from .averages import Averaging
from .preferences import FusedHead, PairHooks, datasets, log_probs_of, mean_of, of_pairs, ranked_by

__all__ = ["arguments", "datasets", "metric", "trainer"]


class RunORPOTrainer(FusedHead, Averaging, PairHooks, ORPOTrainer):
    """TRL's trainer with the run's hooks."""

    def compute_loss(
        self, model: torch.nn.Module, inputs: Batch, *arguments: object, **options: object
    ) -> torch.Tensor:
        """Return the mean loss of a micro-batch of pairs, in nats (the paper's equation 6).

        Each pair counts the same. TRL averages the imitated tokens of a micro-batch instead, so that long answers count
        more, and its loss depends on the micro-batch and on the number of ranks; with one pair per micro-batch both are
        equal. As in TRL and in the authors' code, the better conversation is imitated with its prompt.
        """
        answers = inputs["completion_mask"].bool()
        pairs = len(answers) // 2
        imitated = inputs["attention_mask"][:pairs].bool()
        log_probs = log_probs_of(model, inputs, torch.cat([imitated, answers[pairs:]]))
        imitation = -mean_of(log_probs[:pairs], imitated)
        terms, chosen, rejected, *_ = self.odds_ratio_loss(*mean_of(log_probs, answers).chunk(2))
        self.averages.add(of_pairs(chosen, rejected) | {"nll_loss": imitation, "odds_loss": -terms})
        return self.mean(imitation - terms)


def arguments(common: Json, recipe: Recipe) -> ORPOConfig:
    """Return TRL's arguments."""
    return ORPOConfig(**common, beta=Orpo.of(recipe).beta, max_length=recipe.sequence_length)


trainer = RunORPOTrainer.of
metric = ranked_by(scores.log_likelihood_per_token)
