"""How far off the planner is on published runs of what this project runs: what the documents say."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from .published_errors import Comparison, Measure, comparisons, layout
from .published_rows import SHARES, PublishedRow
from .ranges import inside
from .rank_correlation import rank_correlation


def table(rows: Sequence[PublishedRow], data: Mapping[str, Any]) -> str:
    """Return the errors of each share of the rows, and in each layout of theirs.

    Args:
        rows: of which those with transformers' layers count, under DeepSpeed, by DDP or on one GPU.
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
    """Return the errors on all runs that nothing was fitted on.

    Args:
        rows: as in `table`.
        data: as in `table`.
    """
    others = [row for row in rows if row.share != "fitted" and row.runs_as_here]
    memory, time = (_said(comparisons(others, measure), data["ranges"][measure]) for measure in get_args(Measure))
    return f"On published runs that nothing was fitted on, memory is off by {memory},\nand speed by {time}.\n"


def _said(compared: Sequence[Comparison], ranges: Mapping[str, Any]) -> str:
    """Return the errors of some runs, how many they are, and the share of them inside the range that a plan states."""
    sizes = [abs(one.error) for one in compared]
    within = statistics.mean(inside(one, ranges) for one in compared)
    return (
        f"{statistics.mean(sizes):.0%} on average and {statistics.median(sizes):.0%} in the median ({len(sizes)} runs, "
        f"{within:.0%} inside the range)"
    )


def _cells(part: Sequence[Comparison], ranges: Mapping[str, Any]) -> str:
    sizes = [abs(one.error) for one in part]
    predicted, measured = [one.predicted for one in part], [one.measured for one in part]
    varies = len(set(predicted)) > 1 and len(set(measured)) > 1
    return " | ".join(
        (
            f"{len(part)}",
            f"{statistics.median(sizes):.1%}",
            f"{statistics.mean(sizes):.1%}",
            f"{statistics.mean(inside(one, ranges) for one in part):.0%}",
            f"{rank_correlation(predicted, measured):.2f}" if varies else "-",
        )
    )
