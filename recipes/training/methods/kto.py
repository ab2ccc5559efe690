"""Answers that were judged good or bad, each by itself (KTO, Ethayarajh et al. 2024, arXiv:2402.01306), by TRL."""

from functools import partial
from typing import Any

import torch.distributed as dist
from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl import KTOConfig, KTOTrainer

from ...spec.errors import UserError
from ...spec.layout import data_parallel_size
from ...spec.recipe import Recipe
from ..console import say
from ..data import load, tokenize, updates
from ..model import control_tokens
from ..parallel import scores
from ..trainer import RunContext, RunHooks


class RunKTOTrainer(RunHooks, KTOTrainer):
    """TRL's trainer with the run's hooks."""

    def _prepare_dataset(self, dataset: Dataset, *arguments: Any) -> Dataset:
        """Return the examples as `datasets` has made them; TRL would pair answers within each rank's own batch."""
        return dataset


def arguments(common: dict[str, Any], recipe: Recipe) -> KTOConfig:
    """Return TRL's arguments."""
    kto = recipe.kto
    weights = {"desirable_weight": kto.good_weight, "undesirable_weight": kto.bad_weight}
    return KTOConfig(**common, beta=kto.beta, max_length=recipe.sequence_length, **weights)


def datasets(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> load.Datasets:
    """Return tokens of judged answers in the order in which they are trained on, each with a mismatched answer.

    Raises:
        UserError: too few examples, or all judged alike.
    """
    found, held_out = load.read_examples(recipe)
    load.show(tokenize.first_judged(found, tokenizer))
    tokens = found.map(partial(with_tokens, tokenizer=tokenizer), remove_columns=found.column_names)
    kept = tokens.filter(partial(_fits, longest=recipe.sequence_length)).shuffle(recipe.seed)
    together = recipe.micro_batch_size * data_parallel_size(recipe.layout, dist.get_world_size())
    kept = kept.select(range(len(kept) // together * together))
    good = sum(kept["label"])
    if not 0 < good < len(kept):
        raise UserError(f"data.path: of {len(kept)} judged answers {good} are good; KTO needs good and bad ones.")
    say(f"training: {len(kept)} judged answers, {good} of them good; {len(found) - len(kept)} too long or left over")
    paired = kept.map(_mismatched, batched=True, batch_size=together)
    size = updates.Size(len(found), len(kept), len(kept), None)
    return load.Datasets(paired, held_out, None, kept[0]["prompt_ids"] + kept[0]["completion_ids"], size)


def with_tokens(example: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the columns that TRL's collator reads."""
    turns, tools = example["prompt"], example["tools"]
    prompt = control_tokens.conversation_tokens(tokenizer, turns, tools, add_generation_prompt=True)
    whole = control_tokens.conversation_tokens(tokenizer, turns + example["completion"], tools)
    return {"prompt_ids": prompt, "completion_ids": whole[len(prompt) :], "label": example["label"]}


def _fits(example: dict[str, Any], longest: int) -> bool:
    return len(example["prompt_ids"]) + len(example["completion_ids"]) <= longest


def _mismatched(examples: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return another example's answer for each, from which the KL is estimated (section 4.1 of the paper).

    The answers of all ranks' micro-batches rotate by one. TRL rotates within each rank's, so that its estimate, and
    with it the loss, depends on the number of ranks.
    """
    answers = examples["completion_ids"]
    return {"KL_completion_ids": [answers[-1], *answers[:-1]]}


def trainer(
    context: RunContext, model: Any, arguments: KTOConfig, dataset: Any, tokenizer: PreTrainedTokenizerBase
) -> RunKTOTrainer:
    """Return TRL's KTOTrainer with the run's hooks."""
    return RunKTOTrainer(context, model=model, args=arguments, train_dataset=dataset, processing_class=tokenizer)


def metric(trainer: RunKTOTrainer, examples: Dataset) -> dict[str, float]:
    """Return how the model ranks good answers against bad ones: `judgement_accuracy` and `judgement_margin`."""
    recipe = trainer.context.recipe
    judged, batch_size = list(examples), recipe.micro_batch_size
    return scores.judgements(trainer.model, trainer.processing_class, judged, batch_size, recipe.layout)
