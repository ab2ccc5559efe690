"""The range of a prediction, from measured runs of the same kind, as factors of their predictions."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from .constants import FILE
from .training_setup import TrainingSetup

ALL = "all"
DATASHEET = "datasheet"
"""The kind of speeds on machines that were not measured: all published runs that can be planned."""


@dataclass(frozen=True)
class Range:
    """Factors of a prediction: the 5 % and 95 % quantiles of measured / predicted over runs of the same kind."""

    low: float
    high: float
    kind: str
    """The kind of runs that the factors are taken from."""


def kinds_of(setup: TrainingSetup) -> tuple[str, ...]:
    """Return the kinds that a run belongs to, the narrowest first.

    Measurements differ most by whether ZeRO-3 shards the weights: gathered weights come and go, and wait for the host
    and the links. If kinds were also divided by method and layout, each would have fewer publishers, and its range
    would cover fewer measurements of other publishers.
    """
    return "sharded" if setup.zero_stage == 3 and setup.zero_ranks > 1 else "whole", ALL


def memory_range(setup: TrainingSetup) -> Range:
    """Return the factors of a GPU's peak."""
    return _range("memory", setup)


def speed_range(setup: TrainingSetup, measured: bool) -> Range:
    """Return the factors of tokens per second.

    Args:
        setup: how the model is trained.
        measured: whether the plan uses measurements of the machine; hosts and links of others differ most.
    """
    if measured:
        return _range("time", setup)
    low, high = _ranges()["time"][DATASHEET][:2]
    return Range(low, high, DATASHEET)


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
    ranges: Mapping[str, Mapping[str, list[float]]] = json.loads(FILE.read_text(encoding="utf-8"))["ranges"]
    return ranges
