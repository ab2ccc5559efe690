"""Finds the operators that took the most time, with their modules, in forward and backward passes."""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from .shares import is_collective, is_operator, on_gpu
from .trace import MODULE, Event, RankTrace

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
    kernels = _kernel_seconds(trace) if on_gpu(trace) else None
    for event, module, seconds in _operators(trace):
        spent = seconds if kernels is None else kernels.get(event.arguments.get("External id"), 0.0)
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


def _kernel_seconds(trace: RankTrace) -> dict[object, float]:
    """Return the seconds of a GPU's kernels by the operator that launched them."""
    found: dict[object, float] = defaultdict(float)
    for event in trace.events:
        if event.kind == "kernel" and not is_collective(event):
            found[event.arguments.get("External id")] += (event.end - event.begin) / 1e6
    return found
