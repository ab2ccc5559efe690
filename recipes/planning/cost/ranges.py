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
    """Return the kinds that a run belongs to, the narrowest first: method and layout, method and place, method, all."""
    method = "full" if setup.lora is None else "qlora" if setup.quantized else "lora"
    states = "on GPUs" if setup.offload_optimizer == "none" else "offloaded"
    return f"{method}, {_place(setup)}", f"{method}, {states}", method, ALL


def _place(setup: TrainingSetup) -> str:
    layout = setup.layout
    split = [name for name in ("tensor", "pipeline", "sequence", "expert") if getattr(layout, name) > 1]
    if split:
        return "+".join(split)
    place = "one GPU" if setup.world_size == 1 else "sharded" if setup.zero_stage == 3 else "copies"
    return place if setup.offload_optimizer == "none" else f"{place}, offloaded"


def memory_range(setup: TrainingSetup) -> Range:
    """Return the factors of a GPU's peak."""
    return _range("memory", setup)


def speed_range(setup: TrainingSetup) -> Range:
    """Return the factors of tokens per second."""
    return _range("time", setup)


def _range(measure: str, setup: TrainingSetup) -> Range:
    known = _ranges()[measure]
    kind = next(kind for kind in kinds_of(setup) if kind in known)
    low, high = known[kind][:2]
    return Range(min(low, 1.0), max(high, 1.0), kind)


@cache
def _ranges() -> Mapping[str, Mapping[str, list[float]]]:
    return json.loads(FILE.read_text(encoding="utf-8"))["ranges"]
