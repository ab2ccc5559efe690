"""Handles reasoning in the assistant's turns according to `data.thinking`: removed, or read but not learned."""

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
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
    found = [_without(turn) if turn["role"] == "assistant" else turn for turn in turns]
    for number, turn in enumerate(found, start=1):
        if (
            turn["role"] == "assistant"
            and not (turn["content"] or turn.get("tool_calls"))
            and turns[number - 1] != turn
        ):
            raise UserError(
                f"data.thinking=strip: leaves nothing of turn {number}, which only reasons; remove the example, or use "
                f"data.thinking=learn.\nIt begins: {str(turns)[:200]}"
            )
    return found


def _without(turn: Json) -> Json:
    kept = {name: value for name, value in turn.items() if name not in REASONING}
    content = kept.get("content")
    return kept | {"content": AT_START.sub("", content, count=1)} if isinstance(content, str) else kept


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
    for start, end in _runs(assistant):
        block = _block(tokenizer, tokens[start:end])
        if block is not None:
            found = True
            kept[start + block.start : start + block.stop] = [False] * len(block)
    if not found and turns and turns[-1]["role"] == "assistant" and _reasons(turns[-1]):
        raise UserError("it writes no known reasoning block, so data.thinking=read has nothing to exclude")
    return kept


def _reasons(turn: Json) -> bool:
    content = turn.get("content")
    block = AT_START.match(content) if isinstance(content, str) else None
    return any(turn.get(name) for name in REASONING) or bool(block and block[1].strip())


def _runs(assistant: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each run of the assistant's tokens."""
    for said, stretch in groupby(range(len(assistant)), key=lambda at: assistant[at]):
        if said:
            places = list(stretch)
            yield places[0], places[-1] + 1


def _block(tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[int]) -> range | None:
    """Return the tokens of the first reasoning block with content; it may have begun in the prompt."""
    found = (_between(tokenizer, tokens, begin, close) for begin, close in BLOCKS)
    return next((block for block in found if block is not None), None)


def _between(tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[int], begin: str, close: str) -> range | None:
    def says(words: str, first: int, last: int) -> bool:
        return words in tokenizer.decode(tokens[first:last], skip_special_tokens=False)

    before, closed, _ = tokenizer.decode(tokens, skip_special_tokens=False).partition(close)
    said = before.partition(begin)[2] if begin in before else before
    if not closed or not said.strip():
        return None
    # Text is not cut where tokens are: bisection finds the number of tokens.
    stop = bisect_left(range(len(tokens) + 1), True, key=lambda last: says(close, 0, last))
    if begin not in before:
        return range(stop)
    taken = bisect_left(range(stop + 1), True, key=lambda count: says(begin, stop - count, stop))
    return range(stop - taken, stop)
