"""Does it fit? What the planner answers where others know: `python -m recipes.planning.show.fit_answers`.

Public questions and published rows are planned with exactly their settings; a plan
runs where it has no shortfall, tightly or not.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..calibration.published_errors import planned_memory
from ..calibration.published_rows import SHARES, PublishedRow, published_rows, questions
from ..search.plans import shortfalls


@dataclass(frozen=True)
class FitAnswer:
    """What the planner says of a run, and whether the run fitted."""

    row: PublishedRow
    fits: bool
    gib: float
    """Predicted, of the GPU."""
    memory_gib: float
    """Of the GPU."""

    @property
    def is_right(self) -> bool:
        """Whether it says what was found."""
        return self.fits == self.row.fits


def answers(rows: Iterable[PublishedRow]) -> list[FitAnswer]:
    """Return an answer for every row of which the planner knows the memory."""
    found = []
    for row in rows:
        if row.why_memory_is_not_planned is None:
            memory, cluster = planned_memory(row), row.cluster
            fits = not shortfalls(memory, cluster)
            found.append(FitAnswer(row, fits, memory.worst.total / 2**30, cluster.gpu.memory_gib))
    return found


def summary(name: str, given: Sequence[FitAnswer]) -> str:
    """Return the cells of a line: how many are right, and in which way the others are wrong."""
    optimistic = sum(one.fits and not one.is_right for one in given)
    cautious = sum(not one.fits and not one.is_right for one in given)
    return f"| {name} | {len(given)} | {len(given) - optimistic - cautious} | {optimistic} | {cautious} |"


def report() -> str:
    """Return the answers to the public questions and to each share of the published rows, and the wrong ones."""
    asked = answers(questions())
    lines = [
        "| runs | answered | right | fits, but ran out of memory | does not fit, but ran |",
        "|---|---|---|---|---|",
    ]
    lines.append(summary("public questions", asked))
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
