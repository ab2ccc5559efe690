"""Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290), by TRL's DPOTrainer."""

import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from ...recipe.files import Json
from ...recipe.methods import Dpo
from ...recipe.recipe import Recipe
from ..data import collate
from ..data.collate import Batch
from ..parallel import scores
from .preferences import PairHooks, datasets, precomputed, ranked_by, with_reference

__all__ = ["arguments", "datasets", "metric", "trainer"]


REFERENCE = ("ref_chosen_logps", "ref_rejected_logps")
UNEVEN = "uneven"
"""Key of a micro-batch of which some ranks have fewer pairs."""


class RunDPOTrainer(PairHooks, DPOTrainer):
    """TRL's trainer with the run's hooks."""

    before: torch.Tensor | None = None
    """The reference model's log-likelihoods of all pairs, if they are computed once; [pairs, 2], on the host."""
    one_by_one = False
    """Whether the micro-batch is one of which some ranks have fewer pairs."""

    def prepare_step(self, batches: list[Batch], items: object) -> tuple[list[Batch], object]:
        """Also mark the micro-batch of which some ranks have fewer pairs."""
        batches, items = super().prepare_step(batches, items)
        return [*batches[:-1], {**batches[-1], UNEVEN: self.uneven}], items

    def _precompute_ref_logps(self, dataset: Dataset, *arguments: object) -> Dataset:
        """Return the pairs unchanged; TRL's computation here is postponed until the engine exists."""
        return dataset

    def on_engine_ready(self) -> None:
        """Also compute or read the reference model's log-likelihoods."""
        super().on_engine_ready()
        if self.precompute_ref_logps:
            self.before = precomputed(self, self.train_dataset)

    def training_step(self, model: torch.nn.Module, inputs: Batch, *arguments: object) -> torch.Tensor:
        """Return the loss of a micro-batch, with the reference model's log-likelihoods of its pairs."""
        if self.before is not None:
            sides = self.before[inputs[collate.KEY]].to(self.args.device, non_blocking=True).unbind(1)
            inputs |= dict(zip(REFERENCE, sides, strict=True))
        self.one_by_one = inputs.pop(UNEVEN, False)
        return super().training_step(model, inputs, *arguments)

    def compute_loss(
        self, model: torch.nn.Module, inputs: Batch, *arguments: object, **options: object
    ) -> torch.Tensor:
        """Return a micro-batch's part of the step's mean over pairs.

        TRL gathers the numbers of all ranks' pairs at every pass, which must be equally many: pairs that ranks cannot
        share evenly are passed one by one, and ranks without another one repeat theirs, without effect on the loss.
        """
        pairs, ordinary = len(inputs["input_ids"]) // 2, super().compute_loss
        if not self.one_by_one:
            return self.mean(ordinary(model, inputs, *arguments, **options).expand(pairs))
        losses = []
        for number in range(self.context.recipe.micro_batch_size):
            at = number % pairs
            one = {  # a micro-batch has all better answers, then all worse ones
                name: value[[at]] if name in REFERENCE else value[[at, pairs + at]] if torch.is_tensor(value) else value
                for name, value in inputs.items()
            }
            losses.append(ordinary(model, one, *arguments, **options) * (number < pairs))
        return self.mean(torch.stack(losses))


def arguments(common: Json, recipe: Recipe) -> DPOConfig:
    """Return TRL's arguments."""
    dpo = Dpo.of(recipe)
    loss = {"loss_type": dpo.loss, "label_smoothing": dpo.label_smoothing, "beta": dpo.beta}
    options = {"max_length": recipe.sequence_length, "precompute_ref_log_probs": dpo.precompute}
    return DPOConfig(**common, **loss, **options)


trainer = with_reference(RunDPOTrainer)
metric = ranked_by(scores.log_likelihood)
