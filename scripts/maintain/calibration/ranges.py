"""Fits the low and the high value of predictions, by the kind of run.

They are quantiles of measured / predicted over the published rows of the fitted share with transformers' layers under
DeepSpeed or on one GPU; runs of other software are not representative. Rows of one publisher have similar errors, so
quantiles over all rows would be too narrow for the next publisher. Therefore each publisher is left out in turn, and
all ranges are widened by the largest excess of any left-out publisher (conformalised quantile regression,
arXiv:1905.03222, with publishers as groups, arXiv:1809.07441, but the maximum because there are too few publishers for
a quantile). `coverage` is the share of the remaining rows, which were not used here, inside their ranges.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from deepspeed_recipes.planning.cost.constants import ALL, DATASHEET, kinds_of

from .published_errors import Comparison, Measure, comparisons, speeds_of_strangers
from .published_rows import SHARES, PublishedRow

LOW, HIGH = 0.05, 0.95
"""The quantiles."""
ENOUGH = 8
"""Minimum number of rows for a kind; kinds with fewer use the range of a wider kind."""
FULL = 0.8
"""Reserved share of a GPU above which PyTorch releases cached blocks; below it, reserved memory overstates the need."""
PUBLISHERS = 2
"""Minimum number of publishers for a kind, since one publisher does not show how publishers differ."""


@dataclass(frozen=True)
class Residual:
    """The deviation of a measurement from its prediction."""

    publisher: str
    kinds: tuple[str, ...]
    """Kinds of the run, the narrowest first."""
    log: float
    """Logarithm of measured / predicted."""


Quantiles = Mapping[str, tuple[float, float, int]]
"""Low, high and the number of rows, by kind."""


def fit(rows: Sequence[PublishedRow]) -> dict[str, dict[str, list[float]]]:
    """Return low, high and the number of rows by measure and kind, from the fitted share of the rows.

    The kind `DATASHEET` is the exception: the quantiles of all other speeds that can be planned, with no rule that
    leaves out unusual runs, as a user with an unmeasured machine meets them.
    """
    fitted = [row for row in rows if row.share == "fitted" and row.runs_as_here]
    found: dict[str, dict[str, list[float]]] = {}
    for measure in get_args(Measure):
        residuals = [
            Residual(one.row.publisher, kinds_of(one.row.setup), math.log(one.measured / one.predicted))
            for one in comparisons(fitted, measure)
            if measure == "time" or is_needed(one)
        ]
        below = margin(residuals, lambda low, high, log: low - log)
        above = margin(residuals, lambda low, high, log: log - high)
        found[measure] = {
            kind: [round(math.exp(low - below), 3), round(math.exp(high + above), 3), count]
            for kind, (low, high, count) in quantiles(residuals).items()
        }
    others = [row for row in rows if row.share != "fitted" and row.runs_as_here]
    strangers = [one.measured / one.predicted for one in speeds_of_strangers(others)]
    if strangers:
        found["time"][DATASHEET] = [
            round(quantile(strangers, LOW), 3), round(quantile(strangers, HIGH), 3), len(strangers)
        ]  # fmt: skip
    return found


def is_needed(one: Comparison) -> bool:
    """Return whether a memory measurement is what the run needs, and not what PyTorch keeps on a GPU with much room.

    The copies of a step do not fit into the many smaller blocks that the backward pass freed, and both stay reserved
    until the GPU is full.
    """
    return one.row.memory_is != "reserved" or one.measured > FULL * one.row.cluster.gpu.memory_gib


def quantiles(residuals: Sequence[Residual]) -> Quantiles:
    """Return the quantiles of all rows and of each kind with enough rows and publishers."""
    found: dict[str, tuple[float, float, int]] = {}
    for kind in sorted({kind for one in residuals for kind in one.kinds}):
        mine = [one for one in residuals if kind in one.kinds]
        enough = len(mine) >= ENOUGH and len({one.publisher for one in mine}) >= PUBLISHERS
        if enough or kind == ALL:
            logs = [one.log for one in mine]
            found[kind] = quantile(logs, LOW), quantile(logs, HIGH), len(logs)
    return found


def margin(residuals: Sequence[Residual], excess: Callable[[float, float, float], float]) -> float:
    """Return the width, in logarithms, by which ranges on one side miss left-out publishers at most.

    Args:
        residuals: residuals of all publishers.
        excess: returns how far a residual lies outside on this side, negative if inside, given low, high and the
            residual.
    """
    lacked = [0.0]
    for publisher in sorted({one.publisher for one in residuals}):
        others = quantiles([one for one in residuals if one.publisher != publisher])
        mine = [one for one in residuals if one.publisher == publisher and others]
        ranges = [next(others[kind] for kind in one.kinds if kind in others) for one in mine]
        outside = [excess(low, high, one.log) for one, (low, high, _) in zip(mine, ranges, strict=True)]
        lacked += [quantile(outside, HIGH)] if outside else []
    return max(lacked)


def quantile(values: Iterable[float], share: float) -> float:
    """Return a quantile, linearly interpolated between values."""
    ordered = sorted(values)
    if len(ordered) == 1:
        return ordered[0]
    return statistics.quantiles(ordered, n=100, method="inclusive")[round(100 * share) - 1]


def inside(one: Comparison, ranges: Mapping[str, Any]) -> bool:
    """Return whether a measurement lies inside the range of its prediction."""
    low, high = next(ranges[kind][:2] for kind in kinds_of(one.row.setup) if kind in ranges)
    return min(low, 1.0) <= one.measured / one.predicted <= max(high, 1.0)


def share_inside(compared: Sequence[Comparison], ranges: Mapping[str, Any]) -> str:
    """Return the share of measurements inside their ranges, in percent."""
    return f"{statistics.mean(inside(one, ranges) for one in compared):.0%}"


def coverage(rows: Sequence[PublishedRow], data: Mapping[str, Any]) -> str:
    """Return a table with the coverage of the ranges in each share, for rows with transformers' layers.

    FSDP, which this project never runs, needs more memory than DeepSpeed in the same layout, so its rows are counted
    separately.
    """
    lines = ["| share | measure | sharded by | rows | inside their range |", "|---|---|---|---|---|"]
    for share in SHARES:
        for measure in get_args(Measure):
            compared = comparisons((row for row in rows if row.share == share and row.is_same_stack), measure)
            for name, as_here in (("DeepSpeed, or one GPU", True), ("FSDP", False)):
                found = [one for one in compared if one.row.runs_as_here == as_here]
                if found:
                    within = share_inside(found, data["ranges"][measure])
                    lines.append(f"| {share} | {measure} | {name} | {len(found)} | {within} |")
    return "\n".join(lines)
