"""Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290), by TRL's DPOTrainer."""

from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl import DPOConfig, DPOTrainer

from ...spec.recipe import Recipe
from ..console import say
from ..data import load, tokenize
from ..model import control_tokens
from ..parallel import scores
from ..trainer import RunContext, RunHooks


class RunDPOTrainer(RunHooks, DPOTrainer):
    """TRL's trainer with the run's hooks."""


def arguments(common: dict[str, Any], recipe: Recipe) -> DPOConfig:
    """Return TRL's arguments."""
    return DPOConfig(**common, beta=recipe.dpo.beta, max_length=recipe.sequence_length)


def datasets(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> load.Datasets:
    """Return pairs as read; TRL's trainer tokenizes them."""
    pairs, held_out = load.read_examples(recipe)
    say(f"training: {len(pairs)} pairs")
    load.show(tokenize.first_pair(pairs, tokenizer))
    sample = control_tokens.conversation_tokens(tokenizer, pairs[0]["prompt"])
    return load.Datasets(pairs.map(with_options, fn_kwargs={"tokenizer": tokenizer}), held_out, None, sample)


def with_options(pair: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the column from which TRL takes each pair's options of `apply_chat_template`."""
    turns = pair["prompt"] + pair["chosen"] + pair["rejected"]
    return {"chat_template_kwargs": control_tokens.template_options(tokenizer, turns, pair["tools"])}


def trainer(
    context: RunContext, model: Any, arguments: DPOConfig, dataset: Any, tokenizer: PreTrainedTokenizerBase
) -> RunDPOTrainer:
    """Return TRL's DPOTrainer with the run's hooks."""
    return RunDPOTrainer(context, model=model, args=arguments, train_dataset=dataset, processing_class=tokenizer)


def metric(trainer: RunDPOTrainer, examples: Dataset) -> float:
    """Return the share of pairs whose chosen answer the model finds likelier than the rejected one."""
    recipe = trainer.context.recipe
    pairs, batch_size = list(examples), recipe.micro_batch_size
    return scores.preference_accuracy(trainer.model, trainer.processing_class, pairs, batch_size, recipe.layout)
