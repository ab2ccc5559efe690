"""Reward modelling: a model that gives each answer a number, higher for the better of two, on TRL's RewardTrainer.

The loss is Bradley and Terry's, `-log sigmoid(chosen - rejected)` (Ouyang et al. 2022, arXiv:2203.02155, equation 1).
"""

from functools import partial
from typing import Any

import torch
from datasets import Dataset
from torch.nn.functional import logsigmoid
from transformers import PreTrainedTokenizerBase
from trl import RewardConfig, RewardTrainer

from ...spec.errors import UserError
from ...spec.recipe import Recipe
from ..console import say
from ..data import load, tokenize, updates
from ..model import control_tokens
from ..parallel import scores
from ..trainer import RunContext, RunHooks
from .averages import Averages

SIDES = ("chosen", "rejected")


class RunRewardTrainer(RunHooks, RewardTrainer):
    """TRL's trainer with the run's hooks."""

    def __init__(self, context: RunContext, **options: Any) -> None:
        self.averages = Averages()
        super().__init__(context, **options)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *arguments: Any, **options: Any) -> torch.Tensor:
        """Return the mean loss of a micro-batch, in nats, as TRL computes it but without reading from the device."""
        chosen, rejected = model(**inputs, use_cache=False).logits[:, 0].float().chunk(2)
        margins = chosen - rejected
        self.averages.add(len(margins), chosen=chosen, rejected=rejected, margins=margins, accuracies=margins > 0)
        return -logsigmoid(margins).mean()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the rewards of the training pairs too."""
        super().log(logs | self.averages.take() if "loss" in logs else logs, start_time)


def arguments(common: dict[str, Any], recipe: Recipe) -> RewardConfig:
    """Return TRL's arguments."""
    return RewardConfig(**common, max_length=recipe.sequence_length)


def datasets(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> load.Datasets:
    """Return pairs as the tokens of two conversations each.

    Raises:
        UserError: every pair has an answer that is too long.
    """
    pairs, held_out = load.read_examples(recipe)
    load.show(tokenize.first_pair(pairs, tokenizer))
    tokens = pairs.map(partial(with_tokens, tokenizer=tokenizer), remove_columns=pairs.column_names)
    kept = tokens.filter(partial(_fits, longest=recipe.sequence_length))
    if not len(kept):
        longest = f"sequence_length={recipe.sequence_length}"
        raise UserError(f"data.path: all {len(pairs)} pairs have an answer longer than {longest}; raise it.")
    dropped = len(pairs) - len(kept)
    say(f"training: {len(kept)} pairs" + (f"; {dropped} longer than sequence_length were dropped" if dropped else ""))
    size = updates.Size(len(pairs), len(kept), len(kept), None)
    return load.Datasets(kept, held_out, None, kept[0]["chosen_ids"], size)


def with_tokens(pair: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    """Return the columns that TRL's trainer takes as already tokenized."""
    turns = {f"{side}_ids": pair["prompt"] + pair[side] for side in SIDES}
    return {name: control_tokens.conversation_tokens(tokenizer, said, pair["tools"]) for name, said in turns.items()}


def _fits(pair: dict[str, list[int]], longest: int) -> bool:
    return all(len(tokens) <= longest for tokens in pair.values())


def trainer(
    context: RunContext, model: Any, arguments: RewardConfig, dataset: Any, tokenizer: PreTrainedTokenizerBase
) -> RunRewardTrainer:
    """Return TRL's RewardTrainer with the run's hooks."""
    return RunRewardTrainer(context, model=model, args=arguments, train_dataset=dataset, processing_class=tokenizer)


def metric(trainer: RunRewardTrainer, examples: Dataset) -> dict[str, float]:
    """Return how the model ranks the pairs: `preference_accuracy`, and `preference_margin` in units of reward."""
    recipe = trainer.context.recipe
    pairs, batch_size = list(examples), recipe.micro_batch_size
    measured = (trainer.model, trainer.processing_class, pairs, batch_size, recipe.layout)
    return scores.preferences(*measured, value=scores.reward)
