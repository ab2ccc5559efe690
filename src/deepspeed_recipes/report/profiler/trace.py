"""Reads a rank's trace, written by torch.profiler and `training/callbacks/profiler.py`, into frozen events.

Sets of points in time are sorted, disjoint intervals, from whose lengths the shares of a step are computed.
"""

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from ...recipe.errors import UserError
from ...recipe.files import JsonView

RECORD = "recorded_by_recipes"
"""Key in a trace for the data that the run adds to torch.profiler's: `RankTrace.about`."""
STEP = "step/"
"""Prefix of the names of steps (`step/12`) and of their phases (`step/data`)."""
MODULE = "module/"
"""Prefix of the names of ranges around the forward passes of modules."""
SUFFIX = ".trace.json.gz"
OTHERS = ".other-steps.json"
"""Suffix of the file next to a trace with the number and the median time in seconds of steps not recorded."""


@dataclass(frozen=True)
class Event:
    """An event from `begin` to `end`, in microseconds."""

    name: str
    kind: str
    """The trace's category: `cpu_op`, `user_annotation`, `kernel`, `gpu_memcpy`, `cuda_runtime`."""
    thread: object
    begin: float
    end: float
    arguments: JsonView = field(default_factory=dict)

    @property
    def span(self) -> tuple[float, float]:
        """(begin, end)."""
        return self.begin, self.end


@dataclass(frozen=True)
class RankTrace:
    """The record of one rank."""

    events: tuple[Event, ...]
    """Events by begin, and by length in descending order: an event comes after the event that contains it."""
    about: JsonView
    """`rank`, `host`, `world_size`, `steps` (for each: `step`, `seconds`, and the main thread's `cpu_seconds` in the
    step and in its `data` phase), `offload_optimizer`, `collectives` (gloo only: `name`, `ns`, `group` and `dtype` of
    each call), the `total` and `trained` parameters of the model, `held` (the same for the part of the model that this
    rank shares with others), and the sizes of the layout."""
    groups: Mapping[str, tuple[int, ...]]
    """The ranks of each process group, by the group's name."""

    @cached_property
    def steps(self) -> tuple[Event, ...]:
        """The recorded steps, in order."""
        return tuple(
            event
            for event in self.events
            if event.kind == "user_annotation" and event.name.startswith(STEP) and event.name[len(STEP) :].isdecimal()
        )

    @cached_property
    def main_thread(self) -> object:
        """The thread that runs the steps."""
        return self.steps[0].thread


def read(path: Path) -> RankTrace:
    """Return the trace in a gzipped file."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"{path}: not a trace ({error}).") from None
    found = parse(content)
    if not found.steps:
        raise UserError(f"{path}: the trace contains no recorded step.")
    return found


def parse(content: JsonView) -> RankTrace:
    """Return the trace in a Chrome trace's JSON."""
    base = float(content.get("baseTimeNanoseconds", 0)) / 1000
    events = [
        Event(
            one["name"],
            one.get("cat", ""),
            one.get("tid"),
            float(one["ts"]),
            float(one["ts"]) + float(one["dur"]),
            one.get("args", {}),
        )
        for one in content["traceEvents"]
        # A "gpu_user_annotation" only repeats a range of the host on a GPU's timeline.
        if one.get("ph") == "X" and one.get("cat") not in (None, "Trace", "gpu_user_annotation")
    ]
    groups = content.get("distributedInfo", {}).get("pg_config", ())
    return RankTrace(
        tuple(sorted(events, key=lambda event: (event.begin, -event.end))),
        {**content.get(RECORD, {}), "base_us": base},
        {str(group["pg_name"]): tuple(group["ranks"]) for group in groups},
    )


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
