"""A model's greedy answers to questions with images."""

import inspect
from collections.abc import Collection, Sequence
from typing import Any

from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from ..data.questions import Question
from ..model.generate import greedy
from . import processor
from .tokenize import read_all

AT_ONCE = 16
"""Questions whose images are in memory together."""


def generate(
    seen: Any,
    max_pixels: int,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    max_new_tokens: int,
    synced_gpus: bool = False,
    end: Collection[int] = (),
) -> list[list[int]]:
    """Return the tokens of the model's greedy answer to each question.

    Args:
        seen: the model's processor.
        max_pixels: limit per image.
        model: of transformers or PEFT.
        tokenizer: the model's.
        questions: with all images of their conversations; images after the prompt are ignored.
        max_new_tokens: limit per answer.
        synced_gpus: whether ranks that have finished wait for the others.
        end: tokens that end an answer; by default the model's own.
    """
    pictures = [_shown(seen, one.prompt, read_all(one.where, one.images, max_pixels), tokenizer) for one in questions]
    prompts = [one.prompt for one in questions]
    inputs = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    ids = inputs["input_ids"]
    tower = {
        name: value.to(model.dtype) if value.is_floating_point() else value
        for name, value in processor.for_tower(seen, pictures).items()
    }
    given = {"input_ids": ids, "attention_mask": inputs["attention_mask"], **tower}
    given |= processor.token_types(seen, accepted_by(model), ids)
    return greedy(model, tokenizer, given, max_new_tokens, synced_gpus, end)


def accepted_by(model: Any) -> frozenset[str]:
    """Return the names of the parameters of a model's `forward`."""
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    return frozenset(inspect.signature(type(inner).forward).parameters)


def _shown(seen: Any, prompt: Sequence[int], pictures: Sequence[Any], tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """Return the images whose placeholders are in a prompt, which are the first images."""
    places = list(prompt).count(tokenizer.convert_tokens_to_ids(seen.image_token))
    counts = [text.count(seen.image_token) for text in processor.text_of_pictures(seen, pictures)]
    return [one for at, one in enumerate(pictures) if sum(counts[: at + 1]) <= places]
