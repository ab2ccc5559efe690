"""The sections with the training data, and with sample answers before and after training."""

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from typing import Any

from ...recipe.errors import redact
from ..document import Bars, Block, Marked, Note, Number, Section, Table, number
from ..run_data import Row, RunData

WORDS = re.compile(r"\w+|\s+|[^\w\s]")
"""The units in which answers are compared."""

Pieces = tuple[tuple[str, str], ...]


def answer_section(run: RunData) -> Section:
    """Return the sample answers: questions, expected answers, and the model's answers with the differences marked."""
    blocks = [block for at, rows in enumerate(_by_example(run.answers), 1) for block in _answers(at, rows)]
    why = Note("This run stored none: answers are generated with data.metric=exact_match.")
    return Section("Sample answers", tuple(blocks) or (why,))


def _by_example(answers: Sequence[Row]) -> list[list[Row]]:
    """Return each example's answers, in the order of the steps."""
    found: dict[Any, dict[int, Row]] = {}
    for row in answers:
        found.setdefault(row.get("prompt"), {})[row["step"]] = row
    return [[rows[step] for step in sorted(rows)] for rows in found.values()]


def _answers(at: int, rows: Sequence[Row]) -> Iterator[Block]:
    expected = str(rows[0].get("expected"))
    yield Marked(f"{at}. Question", ((str(rows[0].get("prompt")), ""),))
    yield Marked("expected", ((expected, ""),))
    for row in dict.fromkeys((0, len(rows) - 1)):
        answer = str(rows[row].get("answer"))
        right = ", right" if answer == expected else ""
        yield Marked(f"step {rows[row]['step']}{right}", differences(expected, answer))


def differences(expected: str, answer: str) -> Pieces:
    """Return an answer in pieces: text that it lacks is marked `removed`, additional text `added`."""
    left, right = WORDS.findall(expected), WORDS.findall(answer)
    found: list[tuple[str, str]] = []
    for kind, first, last, start, end in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        missing, given = "".join(left[first:last]), "".join(right[start:end])
        found += [(given, "")] if kind == "equal" else [(missing, "removed"), (given, "added")]
    return tuple((text, mark) for text, mark in found if text)


COUNTS = {
    "examples": "examples read",
    "dropped": "dropped, longer than the sequence length",
    "unlearnable": "dropped, without a token in the loss",
    "extra_pieces": "pieces beyond one per text",
    "sequences": "sequences",
    "tokens": "tokens",
    "loss_tokens": "tokens in the loss",
}
"""Keys of data.json with their descriptions."""


def data_section(run: RunData) -> Section:
    """Return the training data: sources, counts, lengths, and examples with the tokens in the loss marked."""
    training = run.data.get("training") or {}
    data = run.recipe.data
    sources = [("training data", data.path), ("held-out data", data.validation)]
    rows: list[tuple[Any, ...]] = [(what, redact(path)) for what, path in sources if path]
    rows += [(label, _count(training, key)) for key, label in COUNTS.items() if _shown(training, key)]
    if filled := number(_filled(run, training), ".1%", "data.json:filled"):
        rows.append((f"of {run.recipe.sequence_length:,} tokens per sequence filled", filled))
    blocks: list[Block] = [Table(("", ""), tuple(rows))]
    if not training:
        blocks.append(Note("Counts and lengths were not recorded: a stream, preferences, or an older run."))
    if bars := tuple(_lengths(training)):
        blocks.append(Bars("Documents by their length in tokens", bars))
    for at, pieces in enumerate(run.data.get("shown") or ()):
        marked = tuple((str(text), "loss" if learned else "") for text, learned in pieces)
        blocks.append(Marked("Example; marked text is in the loss" if not at else "Another example", marked))
    return Section("Data", tuple(blocks))


def _shown(training: Row, key: str) -> bool:
    return key in training and (bool(training[key]) or key in ("examples", "sequences", "tokens", "loss_tokens"))


def _count(training: Row, key: str) -> Number | None:
    return number(training[key], ",d", f"data.json:training.{key}")


def _filled(run: RunData, training: Row) -> float | None:
    room = training.get("sequences", 0) * run.recipe.sequence_length
    return training.get("tokens", 0) / room if room else None


def _lengths(training: Row) -> Iterator[tuple[str, tuple[tuple[str, Number], ...]]]:
    for at, (low, high, count) in enumerate(training.get("lengths") or ()):
        one = number(count, ",d", f"data.json:training.lengths.{at}.2")
        if one:
            yield f"{low}-{high}", (("documents", one),)
