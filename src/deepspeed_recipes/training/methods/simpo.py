"""SimPO: makes the better answer's tokens likelier than the worse one's by a margin, without a reference model.

Meng et al. 2024, arXiv:2405.14734. The loss is that of TRL's CPOTrainer; its inputs are computed here, in tiles, since
TRL's whole logits of two answers take gigabytes, and it reads a dozen numbers at every pass.
"""

import torch
from trl.experimental.cpo import CPOConfig, CPOTrainer

from ...recipe.files import Json
from ...recipe.methods import Simpo
from ...recipe.recipe import Recipe
from ..data.collate import Batch
from ..parallel import scores
from .averages import Averaging
from .preferences import FusedHead, PairHooks, datasets, log_probs_of, mean_of, of_pairs, ranked_by

__all__ = ["arguments", "datasets", "metric", "trainer"]


class RunSimPOTrainer(FusedHead, Averaging, PairHooks, CPOTrainer):
    """TRL's trainer with the run's hooks."""

    def compute_loss(
        self, model: torch.nn.Module, inputs: Batch, *arguments: object, **options: object
    ) -> torch.Tensor:
        """Return the mean loss of a micro-batch of pairs, in nats (the paper's equation 6)."""
        answers = inputs["completion_mask"].bool()
        log_probs = log_probs_of(model, inputs, answers)
        losses, chosen, rejected = self.cpo_loss(*mean_of(log_probs, answers).chunk(2))
        self.averages.add(of_pairs(chosen, rejected))
        return self.mean(losses)


def arguments(common: Json, recipe: Recipe) -> CPOConfig:
    """Return TRL's arguments; `cpo_alpha` would add CPO's imitation of the better answer, which SimPO lacks."""
    simpo = Simpo.of(recipe)
    loss = {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": simpo.beta, "simpo_gamma": simpo.gamma}
    return CPOConfig(**common, **loss, max_length=recipe.sequence_length)


trainer = RunSimPOTrainer.of
metric = ranked_by(scores.log_likelihood_per_token)
