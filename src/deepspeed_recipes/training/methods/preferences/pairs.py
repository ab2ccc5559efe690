"""Shared by the methods on preference pairs: tokens, the collator, and the ranking of the held-out pairs."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl.trainer.dpo_trainer import DataCollatorForPreference

from ....recipe.errors import UserError
from ....recipe.files import Json
from ....recipe.layout import data_parallel_size
from ....recipe.recipe import Recipe
from ...console import say
from ...data import load, tokenize, updates
from ...data.collate import Batch
from ...parallel import scores
from ...trainer import RunContext, RunHooks

SIDES = ("chosen", "rejected")


def datasets(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> load.Datasets:
    """Return pairs as the tokens of a prompt and its two answers.

    Raises:
        UserError: every pair has an answer that is too long, or two equal answers.
    """
    pairs, held_out = load.read_examples(recipe, tokenizer)
    shown = tokenize.first_pair(pairs, tokenizer)
    load.show(shown)
    tokens = pairs.map(partial(with_tokens, tokenizer=tokenizer), remove_columns=pairs.column_names)
    differing = tokens.filter(lambda pair: pair["chosen_ids"] != pair["rejected_ids"])
    if equal := len(tokens) - len(differing):
        alike = f"{equal} of {len(tokens)} pairs have two answers of the same tokens, as the chat template renders them"
        if not len(differing):
            raise UserError(f"data.path: {alike}; training needs pairs that differ.")
        say(f"warning: training: {alike}; they are dropped")
    kept = tokenize.fitting(differing, recipe)
    say(f"training: {len(kept)} pairs")
    size = updates.Size(len(pairs), len(kept), len(kept), None)
    sample = kept[0]["prompt_ids"] + kept[0]["chosen_ids"]
    return load.Datasets(kept, held_out, None, sample, size, {"shown": shown})


def with_tokens(pair: Json, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    """Return the columns that the collator reads."""
    (chosen, start), (rejected, other) = (tokenize.answered(tokenizer, pair, side) for side in SIDES)
    start = min(start, other)
    return {"prompt_ids": chosen[:start], "chosen_ids": chosen[start:], "rejected_ids": rejected[start:]}


class PairHooks(RunHooks):
    """The run's overrides of a TRL trainer, for pairs that `datasets` has tokenized."""

    def __init__(self, context: RunContext, *, processing_class: PreTrainedTokenizerBase, **options: object) -> None:
        collator = DataCollatorForPreference(processing_class.pad_token_id)
        super().__init__(context, processing_class=processing_class, data_collator=collator, **options)

    pairs_per_pass = 1.0
    """The pairs of the step divided by its micro-batches, both over all ranks."""
    uneven = False
    """Whether some ranks have fewer pairs in the step's last micro-batch."""

    def prepare_step(self, batches: list[Batch], items: object) -> tuple[list[Batch], object]:
        """Count the step's pairs, by which `mean` divides; the last step of an epoch may have fewer."""
        recipe, pairs = self.context.recipe, len(self.train_dataset)
        at = self.state.global_step % updates.per_epoch(pairs, recipe.global_batch_size) * recipe.global_batch_size
        count, ranks = (
            min(recipe.global_batch_size, pairs - at),
            data_parallel_size(recipe.layout, dist.get_world_size()),
        )
        self.pairs_per_pass = count / len(batches) / ranks
        self.uneven = ranks > 1 and count % (recipe.micro_batch_size * ranks) > 0
        return super().prepare_step(batches, items)

    def mean(self, losses: torch.Tensor) -> torch.Tensor:
        """Return a micro-batch's part of the step's mean over pairs, in which each pair counts the same, [].

        The Trainer averages over micro-batches and DeepSpeed over ranks, and TRL does not change that. A smaller
        micro-batch in the last step of an epoch would make its pairs count more than the others.
        """
        return losses.sum() * (not self.filler) / self.pairs_per_pass

    def _prepare_dataset(self, dataset: Dataset, *arguments: object) -> Dataset:
        """Return the pairs unchanged, where TRL's DPO and reward trainers would tokenize them."""
        return dataset

    def tokenize_row(self, feature: Json, model: PreTrainedModel | None = None) -> Json:
        """Return a pair unchanged, where TRL's ORPO and CPO trainers would tokenize it."""
        return feature


def of_pairs(chosen: torch.Tensor, rejected: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the numbers to log for the rewards of pairs, [pairs] each."""
    margins = chosen - rejected
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": margins,
        "rewards/accuracies": margins > 0,
    }


def ranked_by(value: Callable[..., torch.Tensor]) -> Callable[[PairHooks, Dataset], dict[str, float]]:
    """Return a method's `metric`: how the model ranks pairs by one of the values in `scores`.

    It returns `preference_accuracy` and `preference_margin`.
    """

    def metric(trainer: PairHooks, examples: Dataset) -> dict[str, float]:
        recipe = trainer.context.recipe
        pairs, batch_size = list(examples), recipe.micro_batch_size
        return scores.preferences(trainer.model, trainer.processing_class, pairs, batch_size, recipe.layout, value)

    return metric
