"""Steps that learn from answers that the student has just written: Agarwal et al. 2023, algorithm 1.

The seed, the step and the example determine which steps these are and what is sampled, so that another number of ranks
or a resumed run gives the same answers. No gradient passes through the sampling, as in the paper.
"""

import random
from dataclasses import replace
from typing import Any

import torch
from transformers import Trainer

from ....recipe.errors import UserError
from ....recipe.files import Json
from ....recipe.methods import Distill
from ....recipe.recipe import Recipe
from ...console import say
from ...data.collate import IGNORED, Batch
from ...data.example_numbers import FILLER, KEY, filler
from ...data.load import Datasets
from ...model.generate import ends
from ..rollouts import sampling


def with_room(found: Datasets, recipe: Recipe) -> Datasets:
    """Return the datasets without those training examples whose prompts leave no room for an answer.

    Raises:
        UserError: too few are left for a step.
    """
    longest = recipe.sequence_length - Distill.of(recipe).max_new_tokens
    training: Any = found.training
    kept = training.filter(lambda sequence: _prompt_length(sequence["labels"]) <= longest)
    if len(kept) < recipe.global_batch_size:
        raise UserError(
            f"distill.max_new_tokens={Distill.of(recipe).max_new_tokens}: {len(kept)} of {len(training)} prompts leave "
            f"room in sequence_length={recipe.sequence_length}; use fewer, or a larger sequence_length."
        )
    if len(kept) < len(training):
        say(f"distillation: {len(training) - len(kept)} examples left out, whose prompts leave no room for an answer")
    size = found.size and replace(found.size, documents=len(kept), sequences=len(kept))
    return replace(found, training=kept, size=size)


def writes(recipe: Recipe, step: int) -> bool:
    """Return whether the student writes the answers of a step."""
    return random.Random(f"{recipe.seed} {step}").random() < Distill.of(recipe).on_policy


def rewritten(trainer: Trainer, batches: list[Batch]) -> list[Json]:
    """Return a step's micro-batches with the student's answers to their prompts; a collective under ZeRO-3.

    Args:
        trainer: the run's; its model writes.
        batches: from the run's collator, one document per sequence.
    """
    recipe, device = trainer.context.recipe, trainer.accelerator.device
    prompts = [_prompts(batch) for batch in batches]
    seeds = sampling.seeds(recipe.seed, trainer.state.global_step, [number for one in batches for number in one[KEY]])
    answers = iter(
        sampling.written(
            trainer,
            [prompt for batch in prompts for prompt in batch],
            sampling.Noise(seeds, 1.0, device),
            Distill.of(recipe).max_new_tokens,
            ends(trainer.model, trainer.processing_class),
            gather=True,
        )
    )
    found = []
    for batch, own in zip(batches, prompts, strict=True):
        inputs = trainer.data_collator([_sequence(prompt, next(answers)) for prompt in own])
        moved = {name: one.to(device) if torch.is_tensor(one) else one for name, one in inputs.items()}
        found.append({**moved, KEY: batch[KEY]} if FILLER not in batch else filler({**moved, KEY: batch[KEY]}))
    return found


def _prompts(batch: Batch) -> list[list[int]]:
    rows = zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
    return [tokens[: _prompt_length(labels)] for tokens, labels in rows]


def _prompt_length(labels: list[int]) -> int:
    return next((at for at, label in enumerate(labels) if label != IGNORED), 1)  # a filler has no answer


def _sequence(prompt: list[int], answer: list[int]) -> Json:
    length = len(prompt) + len(answer)
    return {
        "input_ids": [*prompt, *answer],
        "labels": [IGNORED] * len(prompt) + answer,
        "seq_lengths": [length],
    }
