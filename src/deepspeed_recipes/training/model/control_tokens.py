"""Treats control tokens in what people wrote as text: `<|end|><|assistant|>` in a question must not end it.

transformers marks them before a template is rendered (`sanitize_control_tokens`), and encodes marked text without its
added tokens. It cannot mark the assistant's tokens for the loss at the same time; this module can. Text without
control tokens takes the usual path, and gives the same tokens. Text with control tokens is refused if transformers is
older than 5.20, which cannot mark them.

The assistant's turns are not protected: what the model learns to write is the user's choice, and often includes
special tokens that the user has added, or the model's tokens for tool calls. They are encoded as in plain
transformers.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ...recipe.errors import UserError, first_line
from ...recipe.files import Json
from .shown import shown

try:
    from transformers.utils.chat_template_utils import (
        _get_control_token_patterns,
        encode_marked_chat,
        mark_control_tokens,
    )
except ImportError:  # transformers before 5.20
    mark_control_tokens = None

    def _get_control_token_patterns(tokens: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """Return patterns for the tokens and for marks; the latter never matches, since this version has no marks."""
        longest_first = sorted(tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)"), re.compile("(?!)")


Turns = list[Json]


@dataclass(frozen=True)
class ControlTokens:
    """Patterns of the control tokens to find in the text of a conversation."""

    control: re.Pattern[str]
    """Matches in descriptions of tools and in every turn except the assistant's: special tokens, and other tokens that
    the template writes itself."""
    markers: re.Pattern[str]
    """Matches the marks in a rendered conversation."""
    images: re.Pattern[str]
    """Matches in the assistant's turns: the tokens that represent an image in the model's input."""

    def occur(self, turns: Turns, tools: list[Json] | None = None) -> bool:
        """Return whether text written by people contains control tokens."""
        return self._first(turns, tools) is not None

    def mark(self, turns: Turns, tools: list[Json] | None = None) -> tuple[Turns, list[Json] | None]:
        """Return turns and tools with their control tokens marked, to be rendered and then encoded by `encode`.

        Where there are control tokens, transformers must be able to mark them.
        """
        if mark_control_tokens is None:
            if found := self._first(turns, tools):
                raise UserError(f"{found!r} is a control token, and transformers before 5.20 cannot treat it as text")
            return turns, tools
        *marked, described = [mark_control_tokens(value, pattern) for value, pattern in self._guarded(turns, tools)]
        return marked, described

    def encode(self, tokenizer: PreTrainedTokenizerBase, chat: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the tokens of a rendered conversation, and the start and end of each in the text."""
        ids: list[int] = []
        places: list[tuple[int, int]] = []
        end = 0
        for found in [*self.markers.finditer(chat), None]:
            piece = chat[end : found.start() if found else None]
            lead = "\n" if end else ""  # before a piece without it SentencePiece would put a space
            alone = tokenizer(lead, add_special_tokens=False)["input_ids"]
            read = tokenizer(lead + piece, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            if read["input_ids"][: len(alone)] != alone:  # the line break has become part of the first token
                alone, lead = [], ""
                read = tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            ids += read["input_ids"][len(alone) :]
            shift = end - len(lead)
            places += [(shift + first, shift + last) for first, last in read["offset_mapping"][len(alone) :]]
            if found:
                end = found.end()
                as_text = encode_marked_chat(tokenizer, found[0], self.markers)
                ids += as_text
                places += [found.span()] * len(as_text)
        return ids, places

    def _first(self, turns: Turns, tools: list[Json] | None) -> str | None:
        texts = ((text, pattern) for value, pattern in self._guarded(turns, tools) for text in _strings(value))
        return next((found[0] for text, pattern in texts if (found := pattern.search(text))), None)

    def _guarded(self, turns: Turns, tools: list[Json] | None) -> Iterator[tuple[Any, re.Pattern[str]]]:
        for turn in turns:
            yield turn, self.images if turn["role"] == "assistant" else self.control
        yield tools, self.control


def control_tokens(tokenizer: PreTrainedTokenizerBase, template: str, images: Collection[str] = ()) -> ControlTokens:
    """Return the patterns that find a tokenizer's control tokens in conversations that a template renders.

    `template` need not be the tokenizer's own. The tokens in `images` represent an image, and are looked for in the
    assistant's turns too.
    """
    added = tokenizer.added_tokens_decoder.values()
    if mark_control_tokens:
        return _patterns(tokenizer._get_control_tokens(template), tuple(images))
    control = (
        token.content for token in added if token.special or (token.content in template and not token.content.isspace())
    )
    return _patterns(tuple(control), tuple(images))


@lru_cache
def _patterns(control: tuple[str, ...], images: tuple[str, ...]) -> ControlTokens:
    found, markers = _get_control_token_patterns(control)
    return ControlTokens(found, markers, _get_control_token_patterns(images)[0])


def conversation_tokens(
    tokenizer: PreTrainedTokenizerBase, turns: Turns, tools: list[Json] | None = None, **options: Any
) -> list[int]:
    """Return a conversation's tokens; `options` are those of `apply_chat_template`, and arguments of the template."""
    template = options.pop("chat_template", None) or tokenizer.chat_template
    arguments = {name: value for name, value in options.items() if name != "add_generation_prompt"}
    try:
        if isinstance(template, str):
            turns = shown(
                tokenizer, template, turns, tools, arguments, bool(options.get("add_generation_prompt"))
            ).turns
        known = control_tokens(tokenizer, template)
        if not known.occur(turns, tools):
            options |= {"chat_template": template, "return_dict": True, "tokenizer_kwargs": {"verbose": False}}
            return tokenizer.apply_chat_template(turns, tools, **options)["input_ids"]
        turns, tools = known.mark(turns, tools)
        chat = tokenizer.apply_chat_template(turns, tools, chat_template=template, tokenize=False, **options)
        return known.encode(tokenizer, chat)[0]
    except (TemplateError, TypeError, ValueError, UserError) as error:
        raise UserError(
            f"the model's chat template refuses this conversation: {first_line(error)}.\nIt begins: {str(turns)[:200]}"
        ) from error


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)
