"""Confidence intervals of scores, and tests for a difference between two models; standard library and numpy."""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

LEVEL = 0.95
"""Confidence level of the intervals."""
RESAMPLES = 2000


def wilson(right: int, examples: int) -> tuple[float, float]:
    """Return the interval of a share (Wilson 1927), which stays within 0 and 1 even if all or none are right."""
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    share = right / examples
    middle = share + z * z / (2 * examples)
    half = z * math.sqrt(share * (1 - share) / examples + z * z / (4 * examples**2))
    scale = 1 + z * z / examples
    # The ends are exact if all or none are right: rounding would move them slightly off 0 and 1.
    low = 0.0 if right == 0 else (middle - half) / scale
    return low, 1.0 if right == examples else (middle + half) / scale


def bootstrap(sums: Sequence[float], counts: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Return the interval of `sum(sums) / sum(counts)` over examples resampled with replacement."""
    numbers = np.random.default_rng(seed)
    drawn = numbers.integers(len(sums), size=(RESAMPLES, len(sums)))
    means = np.asarray(sums)[drawn].sum(1) / np.asarray(counts)[drawn].sum(1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def sign_test(better: int, worse: int) -> float:
    """Return the probability of a split at least this uneven, among differing examples, for two equally good models.

    For right and wrong answers this is McNemar's test in its exact form (McNemar 1947).
    """
    differing = better + worse
    tail = sum(math.comb(differing, count) for count in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**differing)
