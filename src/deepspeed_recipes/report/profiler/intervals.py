"""Sets of points in time as sorted, disjoint intervals, from whose lengths the shares of a step are computed."""

from collections.abc import Iterable
from typing import TypeAlias

Intervals: TypeAlias = tuple[tuple[float, float], ...]
"""(begin, end) pairs, sorted and disjoint."""


def union(spans: Iterable[tuple[float, float]]) -> Intervals:
    """Return the union of spans, which may overlap, nest, and come in any order."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        elif end > begin:
            joined.append((begin, end))
    return tuple(joined)


def both(one: Intervals, other: Intervals) -> Intervals:
    """Return the intersection of two sets."""
    found = []
    left = right = 0
    while left < len(one) and right < len(other):
        begin, end = max(one[left][0], other[right][0]), min(one[left][1], other[right][1])
        if begin < end:
            found.append((begin, end))
        if one[left][1] < other[right][1]:
            left += 1
        else:
            right += 1
    return tuple(found)


def without(one: Intervals, other: Intervals) -> Intervals:
    """Return the part of `one` that is not in `other`."""
    found = []
    at = 0
    for begin, end in one:
        while at < len(other) and other[at][1] <= begin:
            at += 1
        ahead = at
        while ahead < len(other) and other[ahead][0] < end:
            if other[ahead][0] > begin:
                found.append((begin, other[ahead][0]))
            begin = max(begin, other[ahead][1])
            ahead += 1
        if begin < end:
            found.append((begin, end))
    return tuple(found)


def length(intervals: Intervals) -> float:
    """Return the total length."""
    return sum(end - begin for begin, end in intervals)
