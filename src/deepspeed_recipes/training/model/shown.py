"""Converts a conversation to a form in which a chat template renders every text, or refuses the conversation.

Some templates read content only as a list of parts, or reasoning only under one of its names, or silently drop the
text next to a tool call. So each text of a conversation is replaced by a unique word, and the rendered conversation
is searched for these words. Conversations of one shape are rendered once.
"""

import contextlib
import json
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from ...recipe.errors import UserError
from ...recipe.files import Json, JsonView
from ...recipe.samples import REASONING

if TYPE_CHECKING:  # the launcher uses this module, and importing transformers takes seconds
    from transformers import PreTrainedTokenizerBase

Turns = list[Json]

RENDER_SECONDS = 10.0
"""Time limit of a template for a conversation or a probe; templates in use take milliseconds."""
RENDER_BYTES = 2**31
"""Memory limit of a template in addition to the process's own; templates in use take kilobytes."""

TAGS = re.compile(r"(</?think>)")
"""Tags whose content templates move or drop."""
PRINTED = re.compile(r"""['"]type['"]: ['"]text['"], ['"]text['"]: ['"]zq""")
"""A list of content parts that a template has printed, where it should print their texts."""
AT_END = re.compile(r"<[^<>\s]+>$")
"""A token at the end of an answer, as data has it that was written for a tool without chat templates."""
GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")
"""The mark in a template before a text that the assistant writes."""


@dataclass(frozen=True)
class Shown:
    """A conversation in a form that a template renders in full."""

    turns: Turns
    forgets: bool
    """True if reasoning of earlier turns is dropped, as in templates that render only the last turn's."""


@dataclass
class _Words:
    """Words that replace the texts of a conversation, each with a description of its text."""

    meant: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By word: the number of its turn, from 0, or -1 for the tools; and the kind of text, for messages."""

    def new(self, turn: int, what: str) -> str:
        word = f"zq{len(self.meant):04}qz"
        self.meant[word] = (turn, what)
        return word

    def leaves(self, value: object, turn: int, what: str) -> Any:
        """Return a value with words in place of its texts and numbers; keys, booleans and nulls stay."""
        if isinstance(value, dict):
            return {key: self.leaves(one, turn, what) for key, one in value.items()}
        if isinstance(value, list):
            return [self.leaves(one, turn, what) for one in value]
        if isinstance(value, str):
            return self.new(turn, what) if value.strip() else value
        if isinstance(value, int | float) and not isinstance(value, bool):
            number = 7_340_000 + len(self.meant)
            self.meant[str(number)] = (turn, what)
            return number
        return value

    def content(self, text: str, turn: int, role: str) -> str:
        """Return a content with words in place of its text, outside the assistant's `<think>` and `</think>`."""
        pieces = TAGS.split(text) if role == "assistant" else [text]
        made = []
        for at, piece in enumerate(pieces):
            if at % 2 or not piece.strip():
                made.append(piece if at % 2 else " " * bool(piece))
            else:
                reasons = "</think>" in pieces[at + 1 :]
                made.append(self.new(turn, "reasoning" if reasons else "'content'"))
        return "".join(made)


def shown(
    tokenizer: "PreTrainedTokenizerBase",
    template: str,
    turns: Turns,
    tools: list[Json] | None = None,
    options: JsonView | None = None,
    prompt: bool = False,
) -> Shown:
    """Return a conversation in a form in which the template renders every text.

    The forms tried are its own, content as lists of parts, and reasoning under other names. Reasoning that a template
    renders in a last turn and drops once another question follows is dropped on purpose, and not refused. `turns` are
    in OpenAI's form, and `options` are more arguments of the template. Nothing in a `prompt` is learned, and the model
    answers it; models need not read their earlier reasoning.
    """
    words, probe, described = _probed(turns, tools)
    shape = json.dumps([probe, described, options], sort_keys=True, default=str)
    form, missing, forgotten = _best(tokenizer, template, shape, tuple(words.meant.items()), prompt)
    if missing:
        number, what = missing
        if number < 0:
            raise UserError(
                f"it drops {what}, so the model would not read what can be called; describe them in the system turn, "
                "or name another template with model.chat_template"
            )
        turn = turns[number]
        place = " next to its tool calls" if what == "'content'" and turn.get("tool_calls") else ""
        fix = "take it out (in chats, data.thinking=strip does)" if "reasoning" in what else "change the example"
        raise UserError(
            f"it drops {what} of turn {number + 1} ({turn['role']}){place}; {fix}, or name another template with "
            "model.chat_template"
        )
    found = [_in_form(form, turn) for turn in turns]
    for number, turn in enumerate(turns):
        said = str(turn.get("content") or "").rpartition("</think>")[2].strip()  # templates move what is before it
        if prompt or turn["role"] != "assistant" or not (end := AT_END.search(said)):
            continue
        text = tokenizer.apply_chat_template(
            found[: number + 1], tools, chat_template=template, tokenize=False, **(options or {})
        )
        _, said, after = text.rpartition(said)
        if said and end[0] in after:
            raise UserError(
                f"it writes {end[0]} after turn {number + 1} (assistant), which ends with {end[0]} itself, so the "
                "model would learn two of them; remove it from the data"
            )
    if not GENERATION.search(template):  # each beginning is rendered too, and must match the whole
        for number in forgotten:
            found[number] = {key: value for key, value in found[number].items() if key not in REASONING}
    return Shown(found, bool(forgotten))


def _probed(turns: Turns, tools: list[Json] | None) -> tuple[_Words, Turns, Any]:
    """Return the words for a conversation's texts, its turns with them, and the tools with words for names.

    These are the tools' and their parameters'.
    """
    words = _Words()
    probe: Turns = []
    described: list[Json] = []
    for number, turn in enumerate(turns):
        made, content = {**turn}, turn.get("content")
        if isinstance(content, str):
            made["content"] = words.content(content, number, turn["role"])
        elif isinstance(content, list):
            made["content"] = [
                part | {"text": words.content(part["text"], number, turn["role"])} if "text" in part else part
                for part in content
            ]
        for name in REASONING:
            if isinstance(turn.get(name), str):
                made[name] = words.new(number, f"reasoning, in {name!r}")
        if turn.get("tool_calls"):
            made["tool_calls"] = []
            for call in turn["tool_calls"]:
                name = words.new(number, "the name of a tool call")
                arguments = call.get("function", call)["arguments"]
                called = {"name": name, "arguments": words.leaves(arguments, number, "an argument of a tool call")}
                made["tool_calls"].append(call | ({"function": called} if "function" in call else called))
        probe.append(made)
    for tool in tools or ():
        function = tool.get("function", tool)
        named = {**function, "name": words.new(-1, "'tools'")} if function.get("name") else {**function}
        for key, schema in function.items():  # `parameters`, or under the name that another API has for it
            properties = schema.get("properties") if isinstance(schema, dict) else None
            if isinstance(properties, dict):
                renamed = {name: words.new(-1, "parameters of 'tools'") for name in properties}
                required = [renamed.get(name, name) for name in schema.get("required") or ()]
                own = {renamed[name]: one for name, one in properties.items()}
                named[key] = {**schema, "properties": own, **({"required": required} if "required" in schema else {})}
        described.append({**tool, "function": named} if "function" in tool else named)
    return words, probe, described or None


def owners(
    turns: Turns, tools: list[Json] | None, render: Callable[[Turns, object], tuple[str, Sequence[tuple[int, int]]]]
) -> list[int]:
    """Return the turn's number for each stretch of the assistant's text; none may hold several turns.

    `render` returns a conversation as text, and the spans of the assistant in it.
    """
    words, probe, described = _probed(turns, tools)
    text, spans = render(probe, described)
    text = text.lower()
    places = sorted((text.find(word), turn) for word, (turn, _) in words.meant.items() if word in text and turn >= 0)
    found = []
    for first, last in spans:
        inside = {turn for place, turn in places if first <= place < last}
        if len(inside) > 1:
            raise UserError(
                "it writes several of the assistant's turns as one, so that none can be excluded from the loss"
            )
        # A stretch without text, such as an end token, belongs to the turn before it; a header to the turn after it.
        before = inside.pop() if inside else max((turn for place, turn in places if place < last), default=0)
        found.append(next(number for number in range(before, len(turns)) if turns[number]["role"] == "assistant"))
    return found


Form = tuple[str | None, bool]
FORMS: tuple[Form, ...] = (
    *((None, False), (None, True)),
    *((name, False) for name in REASONING),
    *((name, True) for name in REASONING),
)
"""The forms of a turn for a template: a name for its reasoning or None, and its content as parts or not."""


def _in_form(form: Form, turn: Json) -> Json:
    name, parts = form
    reasoning = next((turn[other] for other in REASONING if other in turn), None)
    if name and reasoning is not None:
        turn = {**{key: value for key, value in turn.items() if key not in REASONING}, name: reasoning}
    content = turn.get("content")
    if parts and isinstance(content, str):
        turn = {**turn, "content": [{"type": "text", "text": content}] if content else []}
    return turn


Missing = tuple[int, str] | None


@lru_cache(maxsize=4096)
def _best(
    tokenizer: "PreTrainedTokenizerBase",
    template: str,
    shape: str,
    told: tuple[tuple[str, tuple[int, str]], ...],
    prompt: bool,
) -> tuple[Form, Missing, frozenset[int]]:
    """Return the first form that renders all texts, or else what the first form drops; and the forgotten turns."""
    probe, tools, options = json.loads(shape)
    meant = dict(told)
    reasons = any("reasoning" in what for _, what in meant.values())
    first: Missing = None
    for form in FORMS if reasons else FORMS[:2]:
        turns = [_in_form(form, turn) for turn in probe]
        dropped = _missing(tokenizer, template, turns, tools, options, meant)
        if dropped is None:  # the template refuses this form; it gives its reason where it is used
            continue
        missed = []
        for number, what in dropped:
            if "reasoning" in what and prompt:
                continue
            if "reasoning" in what and any(turn["role"] == "user" for turn in turns[number:]):
                # Not missed if the template would show the turn's reasoning in a conversation that ended there.
                told_there = json.dumps([turns[number].get(name) for name in (*REASONING, "content")])
                there = dict.fromkeys(re.findall(r"zq\d+qz", told_there), (number, ""))
                if not _missing(tokenizer, template, turns[: number + 1], tools, options, there):
                    continue
            missed.append((number, what))
        if not missed:
            return form, None, frozenset(number for number, _ in dropped)
        first = first or missed[0]
    return FORMS[0], first, frozenset()


def _missing(
    tokenizer: "PreTrainedTokenizerBase",
    template: str,
    turns: Turns,
    tools: list[Json] | None,
    options: JsonView | None,
    meant: Json,
) -> list[tuple[int, str]] | None:
    """Return the texts that the template drops, or None if it refuses the turns."""
    try:
        text = tokenizer.apply_chat_template(
            turns, tools, chat_template=template, tokenize=False, **(options or {})
        ).lower()
    except (TemplateError, TypeError, ValueError):
        return None
    if PRINTED.search(text):
        return None
    # If a turn's reasoning is rendered under one name, its copies under other names are not missed.
    shown_reasoning = {turn for word, (turn, what) in meant.items() if "reasoning, in" in what and word in text}
    numbers = {*range(len(turns)), -1}
    return [
        (turn, what)
        for word, (turn, what) in meant.items()
        if turn in numbers and word not in text and not ("reasoning, in" in what and turn in shown_reasoning)
    ]


@contextlib.contextmanager
def bounded(where: str) -> Iterator[None]:
    """Stop a template that computes for longer than RENDER_SECONDS or takes more memory than RENDER_BYTES.

    Its sandbox has no limit of its own.
    """
    began = time.thread_time()  # on a busy machine a template may have to wait for longer than it may compute

    def stop(number: int, frame: object) -> None:
        if (left := began + RENDER_SECONDS - time.thread_time()) > 0:
            signal.setitimer(signal.ITIMER_REAL, max(left, 0.01))
            return
        raise UserError(
            f"{where}: its chat template has not ended after {RENDER_SECONDS:g} s; correct it, or name another with "
            "model.chat_template."
        )

    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    # Read directly, since this runs for every conversation: psutil takes twice as long, 85 us.
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + RENDER_BYTES
    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, RENDER_SECONDS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (most if soft == resource.RLIM_INFINITY else min(most, soft), hard))
        yield
    except (MemoryError, OverflowError) as error:
        raise UserError(f"{where}: its chat template needs too much memory; correct it.") from error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
