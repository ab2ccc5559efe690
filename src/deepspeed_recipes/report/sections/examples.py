"""What a run has learned from and what it answers: the data, and sample answers before and after training."""

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from typing import Any

from ...recipe.errors import redact
from ..document import Bars, Block, Marked, Note, Number, Section, Table, number
from ..run_data import Row, RunData

WORDS = re.compile(r"\w+|\s+|[^\w\s]")
"""What an answer is compared by."""

Pieces = tuple[tuple[str, str], ...]


def answer_section(run: RunData) -> Section:
    """Return the sample answers: each question, what was expected, and the answers with what differs marked."""
    blocks = [block for at, rows in enumerate(_by_example(run.answers), 1) for block in _answers(at, rows)]
    why = Note("This run stores none: answers are generated where data.metric=exact_match.")
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
    """Return an answer in pieces: what is missing of the expected one is `removed`, what is too much `added`."""
    left, right = WORDS.findall(expected), WORDS.findall(answer)
    found: list[tuple[str, str]] = []
    for kind, first, last, start, end in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        missing, said = "".join(left[first:last]), "".join(right[start:end])
        found += [(said, "")] if kind == "equal" else [(missing, "removed"), (said, "added")]
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
"""The keys of data.json, and what they count."""


def data_section(run: RunData) -> Section:
    """Return the training data: sources, counts, lengths, and examples with the part that is in the loss."""
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
        blocks.append(Marked("An example; what is marked is in the loss" if not at else "Another", marked))
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
