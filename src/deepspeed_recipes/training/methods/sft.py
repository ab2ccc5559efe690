"""Supervised fine-tuning: the loss on the assistant's tokens of conversations.

Runs on transformers' own Trainer, with sequences that `data` has packed and masked. TRL's SFTTrainer computes entropy
and accuracy and gathers them over all ranks at every step, which costs more than it is worth.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import islice

import torch.distributed as dist
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from trl.models.utils import unwrap_model_for_generation

from ...recipe.files import Json
from ...recipe.limits import tiles_loss
from ...recipe.recipe import Recipe
from ...recipe.run_folder import append_jsonl
from .. import distributed
from ..console import say
from ..data import answers
from ..data.collate import Collator
from ..data.image_conversations import PictureCollator
from ..data.load import Datasets, tokenized_datasets
from ..model.attention import needs_boundaries
from ..parallel import scores
from ..parallel.sequence import PartCollator
from ..trainer import Parts, RunContext, RunTrainer

SAMPLES = 5
"""Answers that are stored at each evaluation of the metric."""
LONGEST = 4000
"""Maximum number of stored characters of a prompt, whose end is kept, and of an answer."""
SHOWN, LONGEST_SHOWN = 3, 64
"""Answers that a run stores by default if its metric needs none, and their greatest length in tokens."""
SECONDS = 30.0
"""The time for the answers that are written together."""
TRIED = 100
"""More held-out examples than there are to be answers, among which some may be too long."""
GATHER_LIMIT = 2**30
"""Bytes of weights up to which ZeRO-3's shards are gathered once for generation, not per layer and token."""


def arguments(common: Json, recipe: Recipe) -> TrainingArguments:
    """Return the Trainer's arguments."""
    return TrainingArguments(**common)


def datasets(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Datasets:
    """Return sequences of tokens with labels."""
    return tokenized_datasets(recipe, tokenizer)


def trainer(context: RunContext, parts: Parts) -> RunTrainer:
    """Return transformers' Trainer with the run's hooks."""
    recipe, model, pad = context.recipe, parts.model, parts.tokenizer.pad_token_id
    boundaries = needs_boundaries(model)
    # The stages of a pipeline have no loss or configuration of their own.
    labelled = recipe.layout.pipeline == 1 and tiles_loss(recipe, model.config.get_text_config().vocab_size)
    collator: object
    if recipe.model.vision:
        collator = PictureCollator.of(recipe, parts.tokenizer, model)
    elif recipe.layout.sequence > 1:
        collator = PartCollator(pad, recipe.layout, boundaries, labelled)
    else:
        lengths = recipe.neftune_alpha > 0 or recipe.router_aux_loss_coef > 0
        collator = Collator(pad, boundaries=boundaries, document_lengths=lengths, labelled=labelled)
    return RunTrainer.of(context, parts, data_collator=collator)


def metric(trainer: RunTrainer, examples: Dataset) -> dict[str, float]:
    """Return `exact_match`, the share of last answers that greedy decoding reproduces, and the share `cut_off`.

    The recipe's own metrics are added. Rank 0 stores its first answers in the run folder. `examples` are the held-out
    sequences, one document each.
    """
    recipe = trainer.context.recipe
    written: list[scores.Answer] = []
    gather = _gathers(trainer)
    with _generating(trainer, gather) as whole:
        measured = scores.exact_match(
            whole,
            trainer.processing_class,
            examples,
            recipe.data.max_new_tokens,
            # Each token is a collective also of ranks that share the experts of a layer.
            synced_gpus=recipe.layout.expert > 1 or (not gather and trainer.context.file.stage == 3),
            layout=recipe.layout,
            on_answer=written.append,
            **({"ask": _ask(trainer), "batch_size": answers.AT_ONCE} if recipe.model.vision else {}),
        )
    _store(trainer, written[:SAMPLES])
    pairs = [(one.text, one.expected) for one in written]
    return measured | scores.own_metrics(recipe, pairs, trainer.context.run, trainer.state.global_step)


def answer(trainer: RunTrainer, examples: Dataset) -> None:
    """Store the answers to the first held-out examples in the run folder, where `exact_match` has not; a collective.

    Every rank answers all of `examples`, which are one document each. The time is limited, and ranks that have spent it
    wait for the others. The memory is less than that of a training step, since the prompts and answers of a batch fit
    into a micro-batch.
    """
    recipe, tokenizer = trainer.context.recipe, trainer.processing_class
    batches, longest = questions(recipe, examples, answers.generation_prompt(tokenizer))
    ask, synced = _ask(trainer) if recipe.model.vision else None, dist.get_world_size() > 1
    for asked in batches:
        with _generating(trainer, _gathers(trainer), {"max_time": SECONDS}) as whole:
            found = scores.answers(whole, tokenizer, asked, longest, synced, ask)
        _store(trainer, [replace(one, text=f"{one.text} ...") if one.cut_off else one for one in found])


def questions(recipe: Recipe, examples: Dataset, opening: Sequence[int]) -> tuple[list[list[answers.Question]], int]:
    """Return the sample questions in batches that fit into a micro-batch's tokens, and the longest answer in tokens."""
    room, longest = recipe.micro_batch_size * recipe.sequence_length, recipe.data.max_new_tokens
    count = recipe.data.sample_answers
    if count is None:
        count, longest = SHOWN, min(longest, LONGEST_SHOWN)
    found = [answers.question(example, opening) for example in islice(examples, count + TRIED)]
    found = [one for one in found if one.answer and len(one.prompt) + longest <= room][:count]
    if len(found) < min(recipe.data.sample_answers or 0, len(examples)):
        say(
            f"data.sample_answers={count}: {len(found)} of the first held-out examples are asked: the others have no "
            f"answer, or exceed {room} tokens together with data.max_new_tokens={longest}"
        )
    batches: list[list[answers.Question]] = []
    left = 0
    for one in found:
        tokens = len(one.prompt) + longest
        if tokens > left:
            batches.append([])
            left = room
        batches[-1].append(one)
        left -= tokens
    return batches, longest


def _gathers(trainer: RunTrainer) -> bool:
    """Return whether ZeRO-3's shards are gathered once for all tokens."""
    sizes = (getattr(p, "ds_numel", p.numel()) * p.element_size() for p in trainer.model.parameters())
    return sum(sizes) <= GATHER_LIMIT


def _generating(
    trainer: RunTrainer, gather: bool, options: Json | None = None
) -> AbstractContextManager[PreTrainedModel]:
    """Return the context in which the model generates, with its settings of generation changed by `options`."""
    return unwrap_model_for_generation(
        trainer.deepspeed, trainer.accelerator, gather_deepspeed3_params=gather, generation_kwargs=options
    )


def _ask(trainer: RunTrainer) -> Callable[..., list[list[int]]]:
    """Return the function that answers questions with images."""
    return partial(answers.generate, trainer.data_collator.seen, trainer.context.recipe.data.max_pixels)


def _store(trainer: RunTrainer, found: list[scores.Answer]) -> None:
    for one in found if distributed.is_first() else ():
        row = sample(one.prompt, one.expected, one.text)
        append_jsonl(trainer.context.run.answers, {"step": trainer.state.global_step, **row})


def sample(prompt: str, expected: str, answer: str) -> dict[str, str]:
    """Return one line of `answers.jsonl`: the prompt, the expected and the written answer; long texts are cut.

    An image's placeholders, hundreds of one token, are written as one.
    """
    prompt = re.sub(r"(<[^<>\s]+>)\1+", r"\1", prompt)
    shown = prompt if len(prompt) <= LONGEST else f"... {prompt[-LONGEST:]}"
    return {"prompt": shown, "expected": cut(expected), "answer": cut(answer)}


def cut(text: str) -> str:
    """Return the stored part of a text."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."
