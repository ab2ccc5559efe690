"""Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290), by TRL's DPOTrainer."""

from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl import DPOConfig, DPOTrainer

from ...spec.recipe import Recipe
from ..console import say
from ..data import load, tokenize, updates
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
    shown = tokenize.first_pair(pairs, tokenizer)
    load.show(shown)
    sample = control_tokens.conversation_tokens(tokenizer, pairs[0]["prompt"])
    size = updates.Size(examples=len(pairs), documents=len(pairs), sequences=len(pairs), tokens=None)
    pairs = pairs.map(with_options, fn_kwargs={"tokenizer": tokenizer})
    return load.Datasets(pairs, held_out, None, sample, size, {"shown": shown})


def with_options(pair: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the column from which TRL takes each pair's options of `apply_chat_template`."""
    turns = pair["prompt"] + pair["chosen"] + pair["rejected"]
    return {"chat_template_kwargs": control_tokens.template_options(tokenizer, turns, pair["tools"])}


def trainer(
    context: RunContext, model: Any, arguments: DPOConfig, dataset: Any, tokenizer: PreTrainedTokenizerBase
) -> RunDPOTrainer:
    """Return TRL's DPOTrainer with the run's hooks."""
    return RunDPOTrainer(context, model=model, args=arguments, train_dataset=dataset, processing_class=tokenizer)


def metric(trainer: RunDPOTrainer, examples: Dataset) -> dict[str, float]:
    """Return how the model ranks the pairs: `preference_accuracy` and `preference_margin`."""
    recipe = trainer.context.recipe
    pairs, batch_size = list(examples), recipe.micro_batch_size
    measured = (trainer.model, trainer.processing_class, pairs, batch_size, recipe.layout)
    return scores.preferences(*measured, value=scores.fused_log_likelihood)
