"""Questions and expected answers in the tokens of training: the last answer of a conversation and its prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..model.control_tokens import conversation_tokens
from .collate import IGNORED


@dataclass(frozen=True)
class Question:
    """A conversation up to an answer, and the answer."""

    prompt: list[int]
    answer: list[int]
    """The tokens that training teaches, including the token that ends the answer; empty if nothing is in the loss."""
    images: Sequence[dict[str, Any]] = ()
    where: str = ""
    """The file and line of the example, for messages about its images."""


def generation_prompt(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that the chat template adds after the last turn to start an answer."""
    greeting = [{"role": "user", "content": "Hello"}]
    asked, plain = (conversation_tokens(tokenizer, greeting, add_generation_prompt=added) for added in (True, False))
    differing = (at for at, pair in enumerate(zip(asked, plain, strict=False)) if pair[0] != pair[1])
    return asked[next(differing, min(len(asked), len(plain))) :]


def question(sequence: Mapping[str, Any], opening: Sequence[int]) -> Question:
    """Return the last answer of a sequence that is in the loss, and everything before it as the prompt.

    The template's own generation prompt is not used: thinking templates render it differently from the training text
    (earlier turns without their empty think blocks), so it would not match the prompts in training.

    Args:
        sequence: one document with `input_ids` and `labels`.
        opening: `generation_prompt`. Templates that put it into the loss teach the model to write it, but at inference
            it is part of the prompt.
    """
    tokens, labels = list(sequence["input_ids"]), sequence["labels"]
    end = next((at for at in range(len(labels), 0, -1) if labels[at - 1] != IGNORED), 0)
    start = next((at for at in range(end, 0, -1) if labels[at - 1] == IGNORED), 0)
    for before in range(len(opening) - 1, -1, -1):
        first = start - before
        if first >= 0 and tokens[first : first + len(opening)] == list(opening):
            start = first + len(opening)
            break
    return Question(tokens[:start], tokens[start:end], sequence.get("images") or (), sequence.get("where") or "")
