"""Compares the planner's "fits" or "does not fit" with known outcomes.

Run it with `python -m scripts.maintain.calibration.fit_answers`. Public questions and published rows are planned with
exactly their settings. A plan fits if the high end of its range does, is tight if only its likely value does, and does
not fit otherwise, as in `search.plans`.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from deepspeed_recipes.planning.cost.constants import memory_range
from deepspeed_recipes.planning.search.plans import shortfalls

from .published_errors import planned_memory
from .published_rows import SHARES, PublishedRow, published_rows, questions

AS_HERE = "of these, transformers' layers under DeepSpeed or on one GPU"
Says = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True)
class FitAnswer:
    """The planner's answer for a run, and its outcome."""

    row: PublishedRow
    says: Says
    gib: float
    """Predicted GPU memory."""
    memory_gib: float
    """The GPU's memory."""

    @property
    def is_right(self) -> bool:
        """True if the answer matches the outcome; `tight` always does, because such plans are not recommended."""
        return self.says == "tight" or (self.says == "fits") == self.row.fits


def answers(rows: Iterable[PublishedRow]) -> list[FitAnswer]:
    """Return an answer for every row whose memory the planner can predict.

    Runs that FSDP offloads are omitted: the planner never plans them.
    """
    found = []
    for row in rows:
        foreign = row.sharding == "fsdp" and row.offload != "none"
        if row.why_memory_is_not_planned is None and not foreign:
            memory, cluster = planned_memory(row), row.cluster
            gib = memory.gpu / 2**30
            found.append(FitAnswer(row, _answer(row, shortfalls(memory, cluster), gib), gib, cluster.gpu.memory_gib))
    return found


def _answer(row: PublishedRow, lacking: Sequence[str], gib: float) -> Says:
    if lacking:
        return "does not fit"
    return "tight" if memory_range(row.setup)[1] * gib > row.cluster.gpu.memory_gib else "fits"


def summary(name: str, given: Sequence[FitAnswer]) -> str:
    """Return a row of the table: counts of answers, right answers, tight ones, and each kind of wrong ones."""

    def count(answer: Says, ran: bool) -> int:
        return sum(one.says == answer and one.row.fits == ran for one in given)

    tight = f"{count('tight', True)} ran, {count('tight', False)} did not"
    right = sum(one.is_right for one in given)
    return f"| {name} | {len(given)} | {right} | {tight} | {count('fits', False)} | {count('does not fit', True)} |"


def report() -> str:
    """Return the table of answers to public questions and by share of the published rows, and the wrong answers."""
    asked = answers(questions())
    lines = [
        "| runs | answered | right | of these tight | fits, but ran out of memory | does not fit, but ran |",
        "|---|---|---|---|---|---|",
    ]
    lines.append(summary("public questions", asked))
    lines.append(summary(AS_HERE, [one for one in asked if one.row.runs_as_here]))
    for share in SHARES:
        given = answers(row for row in published_rows() if row.share == share)
        lines.append(summary(f"published rows, {share}", given))
    for one in asked:
        if not one.is_right:
            found = "ran" if one.row.fits else "out of memory"
            lines.append(f"wrong: {one.row}: {one.gib:.1f} of {one.memory_gib:.1f} GiB, {found}: {one.row.address}")
    return "\n".join(lines)


def main(arguments: Sequence[str] = ()) -> int:
    """Print the report."""
    print(report())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
