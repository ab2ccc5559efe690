"""Handles reasoning in the assistant's turns according to `data.thinking`: removed, or read but not learned."""

import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from ...recipe.errors import UserError
from ...recipe.files import Json
from ...recipe.samples import REASONING

if TYPE_CHECKING:  # the launcher uses this module, and importing transformers takes seconds
    from transformers import PreTrainedTokenizerBase

Turns = list[Json]

BLOCKS = (("<think>", "</think>"), ("<|channel>thought", "<channel|>"))
"""Start and end of a reasoning block: in most templates, and in Gemma 4's."""
CLOSED = (*(close for _, close in BLOCKS), "<|channel|>final<|message|>")
"""Texts that end the reasoning before an answer; the last is gpt-oss's."""
AT_START = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
"""A block that an example has in its content."""


def stripped(turns: Turns) -> Turns:
    """Return the turns without the assistant's reasoning. A template may still write an empty block."""
    found = []
    for number, turn in enumerate(turns, start=1):
        kept = turn
        if turn["role"] == "assistant":
            kept = {name: value for name, value in turn.items() if name not in REASONING}
            if isinstance(kept["content"], str):
                kept["content"] = AT_START.sub("", kept["content"], count=1)
            if not (kept["content"] or kept.get("tool_calls")) and kept != turn:
                raise UserError(
                    f"data.thinking=strip: leaves nothing of turn {number}, which only reasons; remove the example, or "
                    f"use data.thinking=learn.\nIt begins: {str(turns)[:200]}"
                )
        found.append(kept)
    return found


def final(text: str) -> str:
    """Return the part of an answer after its reasoning, without surrounding white space."""
    for close in CLOSED:
        text = text.rpartition(close)[2]
    return text.strip()


def unlearned(
    tokenizer: "PreTrainedTokenizerBase", turns: Turns, tokens: Sequence[int], assistant: Sequence[bool]
) -> list[bool]:
    """Return which of the assistant's tokens stay in the loss: not those of reasoning blocks with content.

    An empty block stays: without it the model would have to think before it answers. If the last turn has reasoning,
    the template must write a known block.
    """
    kept, found = list(assistant), False
    for said, stretch in groupby(range(len(assistant)), key=lambda at: assistant[at]):
        places = list(stretch)
        start = places[0]
        block = _block(tokenizer, tokens[start : places[-1] + 1]) if said else None
        if block is not None:
            found = True
            kept[start + block.start : start + block.stop] = [False] * len(block)
    if found or not turns or turns[-1]["role"] != "assistant":
        return kept
    content = turns[-1].get("content")
    written = AT_START.match(content) if isinstance(content, str) else None
    if any(turns[-1].get(name) for name in REASONING) or (written and written[1].strip()):
        raise UserError("it writes no known reasoning block, so data.thinking=read has nothing to exclude")
    return kept


def _block(tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[int]) -> range | None:
    """Return the tokens of the first reasoning block with content; it may have begun in the prompt."""

    def says(words: str, first: int, last: int) -> bool:
        return words in tokenizer.decode(tokens[first:last], skip_special_tokens=False)

    text = tokenizer.decode(tokens, skip_special_tokens=False)
    for begin, close in BLOCKS:
        before, closed, _ = text.partition(close)
        said = before.partition(begin)[2] if begin in before else before
        if not closed or not said.strip():
            continue
        # Text is not cut where tokens are: bisection finds the number of tokens.
        stop = bisect_left(range(len(tokens) + 1), True, key=lambda last: says(close, 0, last))
        if begin not in before:
            return range(stop)
        taken = bisect_left(range(stop + 1), True, key=lambda count: says(begin, stop - count, stop))
        return range(stop - taken, stop)
    return None
