"""Supervised fine-tuning: the loss on the assistant's tokens of conversations.

Runs on transformers' own Trainer, with sequences that `data` has packed and masked. TRL's SFTTrainer computes entropy
and accuracy and gathers them over all ranks at every step, which costs more than it is worth.
"""

import re
from functools import partial
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase, TrainingArguments
from trl.models.utils import unwrap_model_for_generation

from ...recipe.loss_tiles import tiles_loss
from ...recipe.recipe import Recipe
from ...recipe.run_folder import append_jsonl
from .. import distributed
from ..data import answers
from ..data.collate import Collator
from ..data.image_conversations import PictureCollator
from ..data.load import Datasets, tokenized_datasets
from ..model.attention import needs_boundaries
from ..parallel import scores
from ..parallel.sequence import PartCollator
from ..trainer import RunContext, RunTrainer

SAMPLES = 5
"""Answers that are stored at each evaluation of the metric."""
LONGEST = 4000
"""Maximum number of stored characters of a prompt, whose end is kept, and of an answer."""
GATHER_LIMIT = 2**30
"""Bytes of weights up to which ZeRO-3's shards are gathered once for generation, not per layer and token."""


def arguments(common: dict[str, Any], recipe: Recipe) -> TrainingArguments:
    """Return the Trainer's arguments."""
    return TrainingArguments(**common)


def datasets(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Datasets:
    """Return sequences of tokens with labels."""
    return tokenized_datasets(recipe, tokenizer)


def trainer(
    context: RunContext, model: Any, arguments: TrainingArguments, dataset: Any, tokenizer: PreTrainedTokenizerBase
) -> RunTrainer:
    """Return transformers' Trainer with the run's hooks."""
    boundaries, layout = needs_boundaries(model), context.recipe.layout
    # The stages of a pipeline have no loss or configuration of their own.
    labelled = layout.pipeline == 1 and tiles_loss(context.recipe, model.config.get_text_config().vocab_size)
    collator: Any
    if context.recipe.model.vision:
        collator = PictureCollator.of(context.recipe, tokenizer, model)
    elif layout.sequence > 1:
        collator = PartCollator(tokenizer.pad_token_id, layout, boundaries, labelled)
    else:
        noisy = context.recipe.neftune_alpha > 0
        pad = tokenizer.pad_token_id
        collator = Collator(pad, boundaries=boundaries, document_lengths=noisy, labelled=labelled)
    return RunTrainer.of(context, model, arguments, dataset, tokenizer, data_collator=collator)


def metric(trainer: RunTrainer, examples: Dataset) -> dict[str, float]:
    """Return `exact_match`, the share of last answers that greedy decoding reproduces, and the share `cut_off`.

    Rank 0 stores its first answers in the run folder.

    Args:
        trainer: the run's.
        examples: the held-out sequences, one document each.
    """
    recipe, model = trainer.context.recipe, trainer.model
    samples: list[dict[str, Any]] = []
    asking: dict[str, Any] = {}
    if recipe.model.vision:
        ask = partial(answers.generate, trainer.data_collator.seen, recipe.data.max_pixels)
        asking = {"ask": ask, "batch_size": answers.AT_ONCE}

    def keep(answer: scores.Answer) -> None:
        if len(samples) < SAMPLES:
            row = sample(answer.prompt, answer.expected, answer.text)
            samples.append({"step": trainer.state.global_step, **row})

    weights = sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in model.parameters())
    gather = weights <= GATHER_LIMIT
    engine, accelerator = trainer.deepspeed, trainer.accelerator
    with unwrap_model_for_generation(engine, accelerator, gather_deepspeed3_params=gather) as whole:
        measured = scores.exact_match(
            whole,
            trainer.processing_class,
            examples,
            recipe.data.max_new_tokens,
            synced_gpus=not gather and trainer.context.file.stage == 3,
            layout=recipe.layout,
            on_answer=keep,
            **asking,
        )
    for row in samples if distributed.is_first() else ():
        append_jsonl(trainer.context.run.answers, row)
    return measured


def sample(prompt: str, expected: str, answer: str) -> dict[str, str]:
    """Return one line of `answers.jsonl`: the prompt, the expected and the written answer; long texts are cut.

    An image's placeholders, hundreds of one token, are written as one.
    """
    prompt = re.sub(r"(<[^<>\s]+>)\1+", r"\1", prompt)
    texts = {"expected": expected, "answer": answer}
    cut = {name: text if len(text) <= LONGEST else f"{text[:LONGEST]} ..." for name, text in texts.items()}
    return {"prompt": prompt if len(prompt) <= LONGEST else f"... {prompt[-LONGEST:]}", **cut}
