"""Does it fit? What the planner answers where others know: `python -m scripts.maintain.calibration.fit_answers`.

Public questions and published rows are planned with exactly their settings. A plan fits if the high value of its range
does, is tight if its likely value does, and does not fit otherwise, as in `search.plans`.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from deepspeed_recipes.planning.cost.ranges import memory_range
from deepspeed_recipes.planning.search.plans import shortfalls

from .published_errors import planned_memory
from .published_rows import SHARES, PublishedRow, published_rows, questions

AS_HERE = "of these, transformers' layers under DeepSpeed or on one GPU"
Says = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True)
class FitAnswer:
    """What the planner says of a run, and whether the run fitted."""

    row: PublishedRow
    says: Says
    gib: float
    """Predicted, of the GPU."""
    memory_gib: float
    """Of the GPU."""

    @property
    def is_right(self) -> bool:
        """Whether it says what was found; a tight plan may run or not, and is not recommended."""
        return self.says == "tight" or (self.says == "fits") == self.row.fits


def answers(rows: Iterable[PublishedRow]) -> list[FitAnswer]:
    """Return an answer for every row of which the planner knows the memory.

    Runs that FSDP itself offloads are left out: the planner never plans them.
    """
    found = []
    for row in rows:
        foreign = row.sharding == "fsdp" and row.offload != "none"
        if row.why_memory_is_not_planned is None and not foreign:
            memory, cluster = planned_memory(row), row.cluster
            gib = memory.worst.total / 2**30
            found.append(FitAnswer(row, _says(row, shortfalls(memory, cluster), gib), gib, cluster.gpu.memory_gib))
    return found


def _says(row: PublishedRow, lacking: Sequence[str], gib: float) -> Says:
    if lacking:
        return "does not fit"
    return "tight" if memory_range(row.setup).high * gib > row.cluster.gpu.memory_gib else "fits"


def summary(name: str, given: Sequence[FitAnswer]) -> str:
    """Return the cells of a line: how many are right, how many of them tight, and in which way the others are wrong."""

    def count(says: Says, ran: bool) -> int:
        return sum(one.says == says and one.row.fits == ran for one in given)

    tight = f"{count('tight', True)} ran, {count('tight', False)} did not"
    right = sum(one.is_right for one in given)
    return f"| {name} | {len(given)} | {right} | {tight} | {count('fits', False)} | {count('does not fit', True)} |"


def report() -> str:
    """Return the answers to the public questions and to each share of the published rows, and the wrong ones."""
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
