"""The collectives of a rank's recorded steps: bytes and time, by kind and process group."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from statistics import mode

from ...recipe.files import JsonView
from .shares import activity, is_collective, on_gpu
from .trace import Event, RankTrace, both, length, union, without

CALLS = {
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "alltoall_base_": "all-to-all",
    "alltoall_": "all-to-all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "send": "send",
    "recv_": "receive",
    "barrier": "barrier",
}
"""PyTorch's names of collectives, without `c10d::`, and the usual names."""
OF_NCCL = {
    "_allgather_base": "all-gather",
    "allgather": "all-gather",
    "_reduce_scatter_base": "reduce-scatter",
    "reduce_scatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "all_to_all": "all-to-all",
    "all_to_allv": "all-to-all",
}
"""Names of collectives in the events of NCCL's kernels; names that are not listed are kept."""
OF_GLOO = {
    "all-gather": "gloo:all_gather",
    "reduce-scatter": "gloo:all_reduce",
    "all-reduce": "gloo:all_reduce",
    "all-to-all": "gloo:all_to_all",
    "broadcast": "gloo:broadcast",
    "reduce": "gloo:reduce",
    "send": "gloo:send",
    "receive": "gloo:recv",
    "barrier": "gloo:barrier",
}
"""The operation that gloo's thread executes for a collective; gloo has no reduce-scatter."""
BYTES = {"float": 4, "int": 4, "bfloat16": 2, "half": 2, "double": 8, "long": 8, "long int": 8, "byte": 1, "char": 1}
BYTES |= {"c10::bfloat16": 2, "c10::half": 2, "unsigned char": 1, "bool": 1, "signed char": 1}


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind in one process group."""

    kind: str
    ranks: tuple[int, ...]
    """Ranks of the group; empty if the trace lacks them."""
    count: int
    bytes: int
    """Bytes of the whole message: the output of an all-gather, the input of a reduce-scatter or an all-reduce."""
    seconds: float
    """Time in flight."""
    waited: float
    """Time in flight during which no operator ran."""

    @property
    def bandwidth(self) -> float:
        """Bytes per second that a rank receives during flight, assuming a ring's share of each message."""
        others = (len(self.ranks) - 1) / len(self.ranks) if self.ranks else 1.0
        received = self.bytes * others * (2 if self.kind == "all-reduce" else 1)
        return received / self.seconds if self.seconds else 0.0


def of_rank(trace: RankTrace) -> list[Collective]:
    """Return the collectives of a rank's recorded steps, the longest first."""
    found: dict[tuple[str, tuple[int, ...]], list[tuple[int, tuple[float, float]]]] = defaultdict(list)
    for kind, ranks, size, span in _on_gpu(trace) if on_gpu(trace) else _on_host(trace):
        found[kind, ranks].append((size, span))
    steps, (busy, _) = union(step.span for step in trace.steps), activity(trace)
    rows = []
    for (kind, ranks), calls in found.items():
        flying = both(union(span for _, span in calls), steps)
        if flying:
            size = sum(size for size, _ in calls)
            waited = length(without(flying, busy)) / 1e6
            rows.append(Collective(kind, ranks, len(calls), size, length(flying) / 1e6, waited))
    return sorted(rows, key=lambda one: -one.seconds)


def _on_host(trace: RankTrace) -> Iterator[tuple[str, tuple[int, ...], int, tuple[float, float]]]:
    """Yield the kind, ranks, bytes, and begin and end of each Gloo collective in the profiled steps.

    A call returns before gloo's threads, two per group, have finished it or even begun; they process calls in order.
    When ZeRO-3 prefetches, the flights of a dozen calls can begin after the last call has returned.
    """
    flights: dict[str, list[Event]] = defaultdict(list)
    calls: dict[str, list[Event]] = defaultdict(list)
    for event in trace.events:
        if event.name.startswith("gloo:"):
            flights[event.name].append(event)
        elif event.thread == trace.main_thread and (kind := _kind(event)):
            calls[OF_GLOO[kind]].append(event)
    for name, ours in calls.items():
        waiting = iter(flights[name])
        for event, entry in zip(ours, _entries(name, ours, trace), strict=True):
            # Takes the first flight that began after the call, and drops those before it.
            flight = next((one for one in waiting if one.begin >= event.begin), event)
            if any(step.begin <= event.begin < step.end for step in trace.steps):
                ranks = trace.groups.get(str(entry.get("group")), ())
                size = _bytes(event.arguments, entry, trace)
                yield _kind(event), ranks, size, (event.begin, max(event.end, flight.end))


def _kind(event: Event) -> str:
    """Return the kind of collective that an operator starts, or an empty string for other operators."""
    return CALLS.get(event.name.removeprefix("c10d::"), "") if event.name.startswith("c10d::") else ""


def _entries(name: str, calls: list[Event], trace: RankTrace) -> list[JsonView]:
    """Return the flight recorder's entry for each call of gloo's operation `name`, empty for calls without one.

    Entries are assigned in order, with the offset that puts most calls at the entry nearest in time. Times alone do not
    suffice, since the recorder and the profiler use different clocks: on a virtual machine these differed by up to 100
    microseconds, the time of two calls.
    """
    base = trace.about.get("base_us", 0.0)
    known = sorted(
        (one for one in trace.about.get("collectives", ()) if one["name"] == name), key=lambda one: one["ns"]
    )
    times = [one["ns"] / 1000 - base for one in known]
    if not times:
        return [{}] * len(calls)
    offsets = []
    for number, call in enumerate(calls):
        nearest = bisect_left(times, call.end)
        if nearest == len(times) or (nearest and call.end - times[nearest - 1] <= times[nearest] - call.end):
            nearest -= 1
        offsets.append(nearest - number)
    first = mode(offsets)
    places = range(first, first + len(calls))
    return [known[place] if 0 <= place < len(known) else {} for place in places]


def _bytes(arguments: JsonView, entry: JsonView, trace: RankTrace) -> int:
    """Return the size in bytes of a call's largest argument, which is a tensor or a list of tensors."""
    sizes, kinds = arguments.get("Input Dims", ()), arguments.get("Input type", ())
    known = [(size, kind) for size, kind in zip(sizes, kinds, strict=False) if size]
    counts = ((sum(map(prod, size)) if isinstance(size[0], list) else prod(size), kind) for size, kind in known)
    largest, which = max(counts, default=(0, ""))
    name = which if which.lower() in BYTES else entry.get("dtype", "")
    otherwise: int = trace.about.get("weight_bytes", 4)
    return largest * BYTES.get(name.lower(), otherwise)


def _on_gpu(trace: RankTrace) -> Iterator[tuple[str, tuple[int, ...], int, tuple[float, float]]]:
    """Yield the same as `_on_host` from the events of NCCL's kernels, which include the sizes of messages."""
    for event in trace.events:
        if event.kind != "kernel" or not is_collective(event):
            continue
        about = event.arguments
        name = str(about.get("Collective name", "unknown"))
        most = max(int(about.get("In msg nelems", 0)), int(about.get("Out msg nelems", 0)))
        ranks = trace.groups.get(str(about.get("Process Group Name")), ())
        yield OF_NCCL.get(name, name), ranks, most * BYTES.get(str(about.get("dtype")).lower(), 4), event.span
