"""How far measurements lie from predictions, by the kind of run: the low and the high value of every prediction.

The quantiles are of measured over predicted in the published rows that may be fitted on and that computed with
transformers' layers: what other software needs says little about ours. `coverage` is the share of held-out rows inside
them, which nothing here was taken from.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from ..cost.ranges import ALL, kinds_of
from .published_errors import Comparison, Measure, comparisons
from .published_rows import SHARES, PublishedRow

LOW, HIGH = 0.05, 0.95
"""The quantiles."""
ENOUGH = 8
"""Rows of a kind below which it has the range of a wider one."""


def fit(rows: Sequence[PublishedRow]) -> dict[str, dict[str, list[float]]]:
    """Return low, high and the number of rows by measure and kind, out of the fitted share of the rows."""
    fitted = [row for row in rows if row.share == "fitted" and row.is_same_stack]
    found: dict[str, dict[str, list[float]]] = {}
    for measure in get_args(Measure):
        ratios: dict[str, list[float]] = {}
        for one in comparisons(fitted, measure):
            for kind in kinds_of(one.row.setup):
                ratios.setdefault(kind, []).append(one.measured / one.predicted)
        found[measure] = {
            kind: [round(quantile(each, LOW), 3), round(quantile(each, HIGH), 3), len(each)]
            for kind, each in sorted(ratios.items())
            if len(each) >= ENOUGH or kind == ALL
        }
    return found


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


def coverage(rows: Sequence[PublishedRow], data: Mapping[str, Any]) -> str:
    """Return a table of the share of rows of the same stack inside their ranges, in each share."""
    lines = ["| share | measure | rows | inside their range |", "|---|---|---|---|"]
    for share in SHARES:
        for measure in get_args(Measure):
            compared = comparisons((row for row in rows if row.share == share and row.is_same_stack), measure)
            within = sum(inside(one, data["ranges"][measure]) for one in compared) / len(compared)
            lines.append(f"| {share} | {measure} | {len(compared)} | {within:.0%} |")
    return "\n".join(lines)
