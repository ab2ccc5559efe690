"""The low and the high value of a prediction: what measurements of runs of its kind were, as shares of it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from .constants import FILE
from .training_setup import TrainingSetup

ALL = "all"


@dataclass(frozen=True)
class Range:
    """Factors of a prediction: the 5 and the 95 % quantile of the measurements of its kind."""

    low: float
    high: float
    kind: str
    """The runs that it is taken from."""


def kinds_of(setup: TrainingSetup) -> tuple[str, ...]:
    """Return the kinds that a run belongs to, the narrowest first.

    Whether ZeRO-3 shards the weights is what measurements differ by: gathered weights come and go, and wait for the
    host and the links. By method and layout too there are fewer publishers to a kind, and ranges cover less of others'.
    """
    return "sharded" if setup.zero_stage == 3 and setup.zero_ranks > 1 else "whole", ALL


def memory_range(setup: TrainingSetup) -> Range:
    """Return the factors of a GPU's peak."""
    return _range("memory", setup)


def speed_range(setup: TrainingSetup) -> Range:
    """Return the factors of tokens per second."""
    return _range("time", setup)


def highest_memory() -> list[float]:
    """Return the factors of a GPU's peak at the high end of each kind's range, in ascending order."""
    return sorted(high for _, high, *_ in _ranges()["memory"].values())


def _range(measure: str, setup: TrainingSetup) -> Range:
    known = _ranges()[measure]
    kind = next(kind for kind in kinds_of(setup) if kind in known)
    low, high = known[kind][:2]
    return Range(min(low, 1.0), max(high, 1.0), kind)


@cache
def _ranges() -> Mapping[str, Mapping[str, list[float]]]:
    return json.loads(FILE.read_text(encoding="utf-8"))["ranges"]
