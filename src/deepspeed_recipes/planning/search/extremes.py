"""Finds the smallest cluster on which a run meets its deadline, and the longest sequence that fits on a cluster."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ...recipe.compatibility import positions
from ...recipe.errors import UserError
from ...recipe.limits import NODE
from ..hardware.cluster import Cluster
from .plans import Plan, PlanRequest, SearchResult
from .run_cost import Workload, in_words
from .strategies import search

MOST_NODES = 128
STEP = 1024
"""In tokens. Lengths are multiples of it, so that sequences can be split over ranks."""
MOST = 2**20
"""The longest sequence to try, in tokens, for a model whose positions are not limited."""

Found = tuple[PlanRequest, SearchResult]
"""A request with its plans."""


def growing(cluster: Cluster, larger_nodes: bool = True) -> Iterator[Cluster]:
    """Yield clusters of growing size: more GPUs per node, except for instances, then doubled numbers of nodes."""
    each, nodes = cluster.gpus_per_node, cluster.nodes
    while larger_nodes and not cluster.instance and cluster.nodes == 1 and each < NODE:
        yield replace(cluster, gpus_per_node=each)
        each *= 2
    while nodes <= MOST_NODES:
        yield replace(cluster, gpus_per_node=each, nodes=nodes)
        nodes *= 2


def in_time(request: PlanRequest, workload: Workload, hours: float, larger_nodes: bool = True) -> Found:
    """Return the smallest cluster of the request's GPUs on which the best plan meets the deadline, and its plans.

    Args:
        request: its cluster is the smallest one to try.
        workload: the tokens to train and the prices.
        hours: the deadline.
        larger_nodes: whether nodes may have more GPUs, unless they are rented instances of a fixed size.

    Raises:
        UserError: no cluster meets the deadline; the message names the fastest.
    """

    def taken(found: Found) -> float:
        return workload.hours(found[1].best) if found[1].best else math.inf

    tried: list[Found] = []
    for cluster in growing(request.cluster, larger_nodes):
        tried.append(_with(request, cluster=cluster))
        if taken(tried[-1]) <= hours:
            break
    *slower, last = tried
    if taken(last) <= hours:
        slow = next((one for one in reversed(slower) if one[1].best), last)[0].cluster
        least = slow.nodes if slow.gpus_per_node == last[0].cluster.gpus_per_node else last[0].cluster.nodes
        return _boundary(
            least,
            last[0].cluster.nodes,
            last,
            lambda nodes: _with(request, cluster=replace(last[0].cluster, nodes=nodes)),
            lambda found: taken(found) <= hours,
        )
    nearest = min(tried, key=taken)
    if nearest[1].best is None:
        raise UserError(
            f"nothing fits on up to {MOST_NODES} nodes of {request.cluster.gpu.name}; plan without --deadline."
        )
    cluster = nearest[0].cluster
    raise UserError(
        f"no cluster of up to {MOST_NODES} nodes of {request.cluster.gpu.name} finishes within {in_words(hours)}.\n"
        f"The fastest is {cluster.nodes} x {cluster.gpus_per_node} GPUs with {in_words(taken(nearest))}; a larger "
        "global_batch_size keeps more GPUs busy."
    )


def deadline_met(plan: Plan, workload: Workload, hours: float) -> str:
    """Return the number of GPUs and the time, with a warning if the slow end of the range misses the deadline."""
    taken, cluster = workload.hours(plan), plan.cluster
    slowest = taken * plan.speed / plan.speed_range[0]
    late = f", but up to {in_words(slowest)} within the range: take more GPUs to be safe" if slowest > hours else ""
    gpus = f"{cluster.gpus} GPU{'s' * (cluster.gpus > 1)} ({cluster.nodes} x {cluster.gpus_per_node})"
    return f"The fewest GPUs that finish within {in_words(hours)}: {gpus}, in {in_words(taken)}{late}."


def longest(request: PlanRequest) -> Found:
    """Return the request with the longest sequence that fits, to within about 6 %, and its plans.

    If nothing fits, the sequence has `STEP` tokens. The search goes down from the model's maximum number of positions:
    a short sequence can need more memory than a long one, whose loss is computed in tiles.
    """

    def at(thousands: int) -> Found:
        return _with(request, recipe=replace(request.recipe, sequence_length=STEP * thousands))

    too_long = fits = max(1, int(min(positions(request.recipe.model.config), MOST)) // STEP)
    found = at(fits)
    while not found[1].best and fits > 1:
        too_long, fits = fits, fits // 2
        found = at(fits)
    if not found[1].best:
        return found
    return _boundary(too_long, fits, found, at, lambda tried: tried[1].best is not None, max(1, fits // 16))


def longest_in_words(request: PlanRequest) -> str:
    """Return the answer as a sentence, given the request that `longest` returned."""
    length = request.recipe.sequence_length
    why = "to within about 6 %; with a longer one, the high end of the memory range would not fit"
    if length + STEP > positions(request.recipe.model.config):
        why = "the model has no more positions"
    return f"The longest sequence that fits has {length:,} tokens ({why})."


def _with(request: PlanRequest, **changes: Any) -> Found:
    changed = replace(request, **changes)
    return changed, search(changed)


def _boundary(
    bad: int, good: int, found: Found, at: Callable[[int], Found], enough: Callable[[Found], bool], close: int = 1
) -> Found:
    """Return what is found at the last good value on the way to a bad one, to within `close`, by bisection."""
    while abs(good - bad) > close:
        middle = (good + bad) // 2
        tried = at(middle)
        if enough(tried):
            good, found = middle, tried
        else:
            bad = middle
    return found
