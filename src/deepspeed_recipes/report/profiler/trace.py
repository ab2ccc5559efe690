"""A rank's trace, as torch.profiler and `training/callbacks/profiler.py` write it, read into frozen events."""

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ...recipe.errors import UserError

RECORD = "recorded_by_recipes"
"""The key of a trace under which the run has written what torch.profiler does not know: `RankTrace.about`."""
STEP = "step/"
"""Begins the name of a step's range (`step/12`) and of its phases (`step/data`)."""
MODULE = "module/"
"""Begins the name of the range of a module's forward pass."""
SUFFIX = ".trace.json.gz"
OTHERS = ".other-steps.json"
"""Beside a trace: how many steps were not recorded, and their median time in seconds."""


@dataclass(frozen=True)
class Event:
    """Something that ran from `begin` to `end`, in microseconds."""

    name: str
    kind: str
    """The trace's category: `cpu_op`, `user_annotation`, `kernel`, `gpu_memcpy`, `cuda_runtime`."""
    thread: Any
    begin: float
    end: float
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def span(self) -> tuple[float, float]:
        """Begin and end."""
        return self.begin, self.end


@dataclass(frozen=True)
class RankTrace:
    """What one rank recorded."""

    events: tuple[Event, ...]
    """By begin, then the longer one first: an event comes after the one that it is part of."""
    about: Mapping[str, Any]
    """`rank`, `host`, `world_size`, `steps` (of each `step`, `seconds` and the main thread's `cpu_seconds` in it and in
    its `data` phase), `offload_optimizer`, `collectives` (of gloo: `name`, `ns`, `group` and `dtype` of each call),
    `total` and `trained` parameters of the model, `held`: the same of what this rank and those with the same part of it
    have between them, and the layout's numbers."""
    groups: Mapping[str, tuple[int, ...]]
    """The ranks of each process group, by its name."""

    @cached_property
    def steps(self) -> tuple[Event, ...]:
        """The recorded steps, in order."""
        return tuple(
            event
            for event in self.events
            if event.kind == "user_annotation" and event.name.startswith(STEP) and event.name[len(STEP) :].isdecimal()
        )

    @cached_property
    def main_thread(self) -> Any:
        """The thread that runs the steps."""
        return self.steps[0].thread

    def phase(self, name: str) -> list[Event]:
        """Return the ranges of a phase of the steps, such as `data`."""
        return [event for event in self.events if event.kind == "user_annotation" and event.name == STEP + name]


def read(path: Path) -> RankTrace:
    """Return the trace in a gzipped file.

    Raises:
        UserError: it is damaged, or no run of this project has written it.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"{path}: not a trace ({error}).") from None
    found = parse(content)
    if not found.steps:
        raise UserError(f"{path}: no recorded step in this trace.")
    return found


def parse(content: Mapping[str, Any]) -> RankTrace:
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
        if one.get("ph") == "X" and one.get("cat") not in (None, "Trace") and not _copy(one)
    ]
    groups = content.get("distributedInfo", {}).get("pg_config", ())
    return RankTrace(
        tuple(sorted(events, key=lambda event: (event.begin, -event.end))),
        {**content.get(RECORD, {}), "base_us": base},
        {str(group["pg_name"]): tuple(group["ranks"]) for group in groups},
    )


def _copy(event: Mapping[str, Any]) -> bool:
    """Return whether a GPU's timeline only repeats a range of the host's."""
    return event.get("cat") == "gpu_user_annotation"
