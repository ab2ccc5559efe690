"""How far off the planner is on published runs of what this project runs: what the documents say."""

import statistics
from collections.abc import Callable, Mapping, Sequence
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
    memory, memories = _said(others, "memory", data, statistics.median)
    speed, speeds = _said(others, "time", data, statistics.mean)
    return (
        f"On published runs that nothing was fitted on, memory is off by {memory} in the median ({memories}\n"
        f"inside the range that a plan states) and speed by {speed} on average ({speeds} inside).\n"
    )


def _said(
    rows: Sequence[PublishedRow], measure: Measure, data: Mapping[str, Any], average: Callable[[list[float]], float]
) -> tuple[str, str]:
    """Return the average error, and how many runs there are with the share of them that is inside the range."""
    found = comparisons(rows, measure)
    within = statistics.mean(inside(one, data["ranges"][measure]) for one in found)
    return f"{average([abs(one.error) for one in found]):.0%}", f"{len(found)} runs, {within:.0%} of them"


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
