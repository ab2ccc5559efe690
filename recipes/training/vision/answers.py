"""A model's greedy answers to conversations with pictures."""

import inspect
from collections.abc import Sequence
from typing import Any

from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from ..model.control_tokens import control_tokens
from ..model.generate import greedy
from . import processor
from .content import with_pictures, without_pictures
from .tokenize import read_all, widened

__all__ = ["generate", "with_pictures"]

AT_ONCE = 16
"""Conversations whose pictures are in memory together."""


def generate(
    seen: Any,
    max_pixels: int,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[dict[str, Any]]],
    max_new_tokens: int,
    synced_gpus: bool = False,
) -> list[str]:
    """Return the model's greedy answer to each conversation, without surrounding white space.

    Args:
        seen: the model's processor.
        max_pixels: of a picture.
        model: of transformers or PEFT.
        tokenizer: the model's.
        prompts: turns, with pictures in their parts (`content.with_pictures`).
        max_new_tokens: of an answer.
        synced_gpus: whether ranks that are done wait for the others.
    """
    tokens, pictures = zip(*(_prompt(seen, max_pixels, tokenizer, turns) for turns in prompts), strict=True)
    inputs = tokenizer.pad({"input_ids": list(tokens)}, padding_side="left", return_tensors="pt")
    ids = inputs["input_ids"]
    tower = {
        name: value.to(model.dtype) if value.is_floating_point() else value
        for name, value in processor.for_tower(seen, pictures).items()
    }
    given = {"input_ids": ids, "attention_mask": inputs["attention_mask"], **tower}
    given |= processor.token_types(seen, accepted_by(model), ids)
    return greedy(model, tokenizer, given, max_new_tokens, synced_gpus)


def accepted_by(model: Any) -> frozenset[str]:
    """Return the names that a model's `forward` takes."""
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    return frozenset(inspect.signature(type(inner).forward).parameters)


def _prompt(
    seen: Any, max_pixels: int, tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, Any]]
) -> tuple[list[int], list[Any]]:
    bare, found = without_pictures(turns)
    known = control_tokens(tokenizer, tokenizer.chat_template)
    marked, _ = known.mark(bare, None)
    chat = tokenizer.apply_chat_template(marked, tokenize=False, add_generation_prompt=True)
    pictures = read_all("a prompt", found, max_pixels)
    chat, _ = widened("a prompt", chat, [], seen.image_token, processor.text_of_pictures(seen, pictures), known)
    return known.encode(tokenizer, chat)[0], pictures
