"""Divides the time of a rank's recorded steps by activity, and finds the operators that took the most of it."""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from .trace import MODULE, STEP, Event, Intervals, RankTrace, both, length, union, without

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
NOT_OPERATORS = ("autograd", "c10d", "_c10d_functional", "torch", "gloo", "nccl")
"""Namespaces of events that are not operators: ranges that may contain Python and collectives, and collectives."""
COLLECTIVES = ("c10d::", "gloo:", "_c10d_functional::", "nccl")


@dataclass(frozen=True)
class Shares:
    """Seconds of a rank's recorded steps. All parts except hidden communication add up to the steps."""

    compute: float
    """Operators: kernels and copies on a GPU, otherwise operators of the main thread."""
    communication_hidden: float
    """Collectives in flight while operators run; part of `compute`."""
    communication_waited: float
    """Collectives in flight while no operator runs."""
    data: float
    """Fetching the step's batches, while nothing else runs."""
    host: float
    """Python between operators, and an optimizer offloaded to the host; with a GPU, while the GPU has no work."""
    idle: float
    """All other time: the process slept, waited for a disk, or other processes used its cores."""

    @property
    def seconds(self) -> float:
        """Total duration of the steps."""
        return self.compute + self.communication_waited + self.data + self.host + self.idle


def of_rank(trace: RankTrace) -> Shares:
    """Return the shares of a rank's recorded steps."""
    steps = union(step.span for step in trace.steps)
    gpu = on_gpu(trace)
    busy, flying = (both(spans, steps) for spans in activity(trace))
    offloaded: Intervals = ()
    if trace.about.get("offload_optimizer", "none") != "none":
        offloaded = both(union(event.span for event in trace.events if event.name.startswith("Optimizer.step#")), steps)
    fetched = (event.span for event in trace.events if event.kind == "user_annotation" and event.name == f"{STEP}data")
    fetching = both(union(fetched), steps)
    busy = without(busy, union((*offloaded, *(() if gpu else fetching))))
    waited = without(flying, busy)
    data = without(fetching, union((*busy, *waited)))
    host = without(offloaded, union((*busy, *waited, *data)))
    rest = without(steps, union((*busy, *waited, *data, *host)))
    if gpu:  # of the rest, in which the GPU had no work, the time in which the host did not prepare any either
        working = union(
            event.span
            for event in trace.events
            if event.thread == trace.main_thread and event.kind in ("cpu_op", "cuda_runtime", "cuda_driver")
        )
        idle = length(without(rest, working))
    else:  # of the rest, the time in which the main thread did not run, except to wait for collectives or data
        off = sum(
            step["seconds"] - step["cpu_seconds"] - max(0.0, step["data_seconds"] - step["data_cpu_seconds"])
            for step in trace.about.get("steps", ())
        )
        idle = min(length(rest), max(0.0, 1e6 * off - length(waited)))
    return Shares(
        compute=length(busy) / 1e6,
        communication_hidden=length(both(flying, busy)) / 1e6,
        communication_waited=length(waited) / 1e6,
        data=length(data) / 1e6,
        host=(length(host) + length(rest) - idle) / 1e6,
        idle=idle / 1e6,
    )


def activity(trace: RankTrace) -> tuple[Intervals, Intervals]:
    """Return when the rank computed, by its GPU's kernels or its main thread's operators, and when collectives flew."""
    if on_gpu(trace):
        device = [event for event in trace.events if event.kind in ON_GPU]
        computing = [event for event in device if not is_collective(event)]
        flying = [event for event in device if is_collective(event)]
    else:
        computing = [event for event in trace.events if event.thread == trace.main_thread and is_operator(event)]
        flying = [event for event in trace.events if is_collective(event)]
    return union(event.span for event in computing), union(event.span for event in flying)


def is_collective(event: Event) -> bool:
    """Return whether an event is a collective or the call that starts it."""
    return event.name.startswith(COLLECTIVES) or (event.kind == "kernel" and "nccl" in event.name.lower())


def on_gpu(trace: RankTrace) -> bool:
    """Return whether the rank computed on a GPU."""
    return any(event.kind in ON_GPU for event in trace.events)


def is_operator(event: Event) -> bool:
    """Return whether an event is a computing operator such as `aten::mm`, and not a range around operators."""
    space, found, _ = event.name.partition("::")
    return bool(found) and event.kind == "cpu_op" and space not in NOT_OPERATORS


BACKWARD = "autograd::engine::evaluate_function"
SEQUENCE = "Sequence number"
"""PyTorch's number of an operator that autograd records; its backward pass has the same number."""


@dataclass(frozen=True)
class Operator:
    """All calls of an operator in modules of one kind."""

    name: str
    module: str
    """Such as `model.layers.*.mlp.down_proj`; empty outside of modules, as for the optimizer."""
    calls: int
    seconds: float
    """Time without that of the operators it calls."""


@dataclass
class _Open:
    """An event that may contain others."""

    event: Event
    inner: float = 0.0


def most_expensive(trace: RankTrace, count: int = 10) -> list[Operator]:
    """Return the operators in which a rank spent the most time."""
    calls: dict[tuple[str, str], list[float]] = defaultdict(list)
    gpu = on_gpu(trace)
    kernels: dict[object, float] = defaultdict(float)  # seconds by the operator that launched them
    for event in trace.events:
        if event.kind == "kernel" and not is_collective(event):
            kernels[event.arguments.get("External id")] += (event.end - event.begin) / 1e6
    for event, module, seconds in _operators(trace):
        spent = kernels.get(event.arguments.get("External id"), 0.0) if gpu else seconds
        calls[event.name, re.sub(r"\.\d+(?=\.|$)", ".*", module)].append(spent)
    found = [Operator(name, module, len(spent), sum(spent)) for (name, module), spent in calls.items()]
    return sorted(found, key=lambda one: -one.seconds)[:count]


def _operators(trace: RankTrace) -> Iterator[tuple[Event, str, float]]:
    """Yield each operator of the steps with its module and its seconds, without the operators that it calls."""
    main, modules = trace.main_thread, dict[int, str]()
    stack: list[_Open] = []
    closed: list[tuple[Event, str, float]] = []

    def close(until: float) -> None:
        while stack and stack[-1].event.end <= until:
            ended = stack.pop()
            if is_operator(ended.event) and any(step.begin <= ended.event.begin < step.end for step in trace.steps):
                seconds = (ended.event.end - ended.event.begin - ended.inner) / 1e6
                closed.append((ended.event, _module(stack, modules), seconds))

    for event in trace.events:
        if event.thread != main or event.kind not in ("cpu_op", "user_annotation"):
            continue
        close(event.begin)
        if is_operator(event):
            outer = next((one for one in reversed(stack) if is_operator(one.event)), None)
            if outer:
                outer.inner += event.end - event.begin
        number = event.arguments.get(SEQUENCE)
        if number is not None and not event.arguments.get("Fwd thread id"):  # forward; also autograd's own functions
            modules[number] = _module(stack, modules) or modules.get(number, "")
        stack.append(_Open(event))
    close(float("inf"))
    yield from closed


def _module(stack: list[_Open], modules: dict[int, str]) -> str:
    """Return the innermost module around an operator, or the module whose backward pass contains it."""
    for one in reversed(stack):
        if one.event.name.startswith(MODULE):
            return one.event.name.removeprefix(MODULE)
        if one.event.name.startswith(BACKWARD):
            return modules.get(one.event.arguments.get(SEQUENCE, -1), "")
    return ""
