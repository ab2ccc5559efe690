"""The planner's errors on published runs with the software of this project, as Markdown for the documents."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from .published_errors import Comparison, Measure, comparisons, layout, order
from .published_rows import SHARES, PublishedRow
from .ranges import share_inside


def table(rows: Sequence[PublishedRow], data: Mapping[str, Any]) -> str:
    """Return a table of the errors in each share of the rows, in total and by layout.

    Args:
        rows: published rows; those with transformers' layers under DeepSpeed, with DDP or on one GPU count.
        data: the constants, with their ranges.
    """
    lines = [
        "| | share | runs | rows | median error | mean error | inside the range | rank correlation |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for measure in get_args(Measure):
        for share in SHARES:
            found = comparisons((row for row in rows if row.share == share and row.runs_as_here), measure)
            for name in ("all", *sorted({layout(one.row) for one in found})) if found else ():
                part = [one for one in found if name in ("all", layout(one.row))]
                lines.append(f"| {measure} | {share} | {name} | {_cells(part, data['ranges'][measure])} |")
    return "\n".join(lines) + "\n"


def sentence(rows: Sequence[PublishedRow], data: Mapping[str, Any]) -> str:
    """Return a sentence with the errors on all rows that nothing was fitted on.

    Args:
        rows: as in `table`.
        data: as in `table`.
    """
    others = [row for row in rows if row.share != "fitted" and row.runs_as_here]
    memory, time = (_summary(comparisons(others, measure), data["ranges"][measure]) for measure in get_args(Measure))
    return f"On published runs that nothing was fitted on, memory is off by {memory},\nand speed by {time}.\n"


def _summary(compared: Sequence[Comparison], ranges: Mapping[str, Any]) -> str:
    """Return the mean and median error, the number of runs, and the share of them inside the predicted range."""
    sizes = [abs(one.error) for one in compared]
    return (
        f"{statistics.mean(sizes):.0%} on average and {statistics.median(sizes):.0%} in the median ({len(sizes)} runs, "
        f"{share_inside(compared, ranges)} inside the range)"
    )


def _cells(part: Sequence[Comparison], ranges: Mapping[str, Any]) -> str:
    sizes = [abs(one.error) for one in part]
    average, median = statistics.mean(sizes), statistics.median(sizes)
    return f"{len(part)} | {median:.1%} | {average:.1%} | {share_inside(part, ranges)} | {order(part)}"
