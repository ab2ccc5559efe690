"""Spearman's rank correlation, which compares the order of predictions with that of measurements."""

import math
from collections.abc import Sequence


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Return Spearman's correlation of two sequences of equal length, neither of them constant."""
    return _correlation(_ranks(left), _ranks(right))


def _ranks(values: Sequence[float]) -> list[float]:
    """Return each value's rank; equal values get their mean rank."""
    return [sum(other < value for other in values) + sum(other == value for other in values) / 2 for value in values]


def _correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Return Pearson's correlation."""
    middle = sum(left) / len(left), sum(right) / len(right)
    pairs = [(one - middle[0], other - middle[1]) for one, other in zip(left, right, strict=True)]
    spread = math.sqrt(sum(one**2 for one, _ in pairs) * sum(other**2 for _, other in pairs))
    return sum(one * other for one, other in pairs) / spread
