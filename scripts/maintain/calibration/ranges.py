"""How far measurements lie from predictions, by the kind of run: the low and the high value of every prediction.

The quantiles are of measured over predicted in the published rows that may be fitted on and that computed with
transformers' layers under DeepSpeed or on one GPU: what other software needs says little about ours. Rows of one
publisher err alike, so that quantiles over all rows are too narrow for the next publisher. Each publisher is therefore
left out in turn, and all ranges are widened by what the one lacked that lay furthest outside (conformalised quantile
regression, arXiv:1905.03222, with publishers as groups, arXiv:1809.07441, too few of them for a quantile over
publishers).
`coverage` is the share of the other rows inside them, which nothing here was taken from.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from deepspeed_recipes.planning.cost.ranges import ALL, kinds_of

from .published_errors import Comparison, Measure, comparisons
from .published_rows import SHARES, PublishedRow

LOW, HIGH = 0.05, 0.95
"""The quantiles."""
ENOUGH = 8
"""Rows of a kind below which it has the range of a wider one."""
FULL = 0.8
"""Share of a GPU that is reserved above which PyTorch gives back what it only kept: below it, that is no need."""
PUBLISHERS = 2
"""Publishers of a kind below which it has: one of them does not show how they differ."""


@dataclass(frozen=True)
class Residual:
    """How far a measurement lies from its prediction."""

    publisher: str
    kinds: tuple[str, ...]
    """Of the run, the narrowest first."""
    log: float
    """Logarithm of measured over predicted."""


Quantiles = Mapping[str, tuple[float, float, int]]
"""By kind: low, high and the number of rows."""


def fit(rows: Sequence[PublishedRow]) -> dict[str, dict[str, list[float]]]:
    """Return low, high and the number of rows by measure and kind, out of the fitted share of the rows."""
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
    return found


def is_needed(one: Comparison) -> bool:
    """Return whether a measurement of memory is what a run needs: not what PyTorch keeps on a GPU with much room.

    A step's copies do not fit into the many smaller pieces that the backward pass has freed, and both stay reserved
    until the GPU is full.
    """
    return one.row.memory_is != "reserved" or one.measured > FULL * one.row.cluster.gpu.memory_gib


def quantiles(residuals: Sequence[Residual]) -> Quantiles:
    """Return the quantiles of each kind that has enough rows and publishers, and of all."""
    found: dict[str, tuple[float, float, int]] = {}
    for kind in sorted({kind for one in residuals for kind in one.kinds}):
        mine = [one for one in residuals if kind in one.kinds]
        enough = len(mine) >= ENOUGH and len({one.publisher for one in mine}) >= PUBLISHERS
        if enough or kind == ALL:
            logs = [one.log for one in mine]
            found[kind] = quantile(logs, LOW), quantile(logs, HIGH), len(logs)
    return found


def margin(residuals: Sequence[Residual], excess: Callable[[float, float, float], float]) -> float:
    """Return how much wider, in logarithms, the quantiles of other publishers would have to be on one side.

    Args:
        residuals: of all publishers.
        excess: of low, high and a residual: how far it lies outside on this side; negative inside.
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
    """Return the value below which a share of some values lie, between two of them in proportion."""
    ordered = sorted(values)
    if len(ordered) == 1:
        return ordered[0]
    return statistics.quantiles(ordered, n=100, method="inclusive")[round(100 * share) - 1]


def inside(one: Comparison, ranges: Mapping[str, Any]) -> bool:
    """Return whether a measurement lies in the range of its prediction."""
    low, high = next(ranges[kind][:2] for kind in kinds_of(one.row.setup) if kind in ranges)
    return min(low, 1.0) <= one.measured / one.predicted <= max(high, 1.0)


def share_inside(compared: Sequence[Comparison], ranges: Mapping[str, Any]) -> str:
    """Return the share of measurements that lie in their ranges, in per cent."""
    return f"{statistics.mean(inside(one, ranges) for one in compared):.0%}"


def coverage(rows: Sequence[PublishedRow], data: Mapping[str, Any]) -> str:
    """Return a table of the share of rows of the same stack inside their ranges, in each share of the rows.

    FSDP, which this project never runs, holds more than DeepSpeed does in the same layout, so its rows are counted
    apart.
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
