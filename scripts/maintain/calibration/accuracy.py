"""The planner's errors on published runs with the software of this project, as Markdown for the documents."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from deepspeed_recipes.planning.cost.constants import DATASHEET

from . import fit_answers
from .published_errors import Comparison, Measure, comparisons, layout, order, speeds_of_strangers
from .published_rows import SHARES, PublishedRow, questions
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
    """Return sentences with the errors on the rows that nothing was fitted on, whatever is unusual about their speeds.

    Args:
        rows: as in `table`.
        data: as in `table`.
    """
    others = [row for row in rows if row.share != "fitted" and row.runs_as_here]
    memory, speeds = comparisons(others, "memory"), speeds_of_strangers(others)
    low, high, _ = data["ranges"]["time"][DATASHEET]
    slower = statistics.mean(one.error > 0 for one in speeds)
    within = statistics.mean(low <= one.measured / one.predicted <= high for one in speeds)
    given = fit_answers.answers(questions())
    promised = [one for one in given if one.says == "fits"]
    return (
        f"On published runs that nothing was fitted on, memory is off by {_errors(memory)} ({len(memory)} runs,\n"
        f"{share_inside(memory, data['ranges']['memory'])} inside the range). Speed on machines of strangers is off by "
        f"{_errors(speeds)} over all {len(speeds)} runs\n"
        f"that can be planned: {slower:.0%} ran slower than planned, and "
        f"{within:.0%} at {low:.2f} to {high:.2f} times the plan, the range that plans print.\n"
        f"The planner gives the right answer to {sum(one.is_right for one in given)} of {len(given)} public questions "
        f"about whether a run fits. {sum(not one.row.fits for one in promised)} of\n"
        f'the {len(promised)} runs with the answer "fits" ran out of memory, for unknown reasons.\n'
    )


def _errors(compared: Sequence[Comparison]) -> str:
    """Return the median and the mean error."""
    sizes = [abs(one.error) for one in compared]
    return f"{statistics.median(sizes):.0%} in the median and {statistics.mean(sizes):.0%} on average"


def _cells(part: Sequence[Comparison], ranges: Mapping[str, Any]) -> str:
    sizes = [abs(one.error) for one in part]
    average, median = statistics.mean(sizes), statistics.median(sizes)
    return f"{len(part)} | {median:.1%} | {average:.1%} | {share_inside(part, ranges)} | {order(part)}"
