"""Finds the smallest cluster on which a run meets its deadline."""

from collections.abc import Iterator
from dataclasses import replace

from ...recipe.errors import UserError
from ...recipe.limits import NODE
from ..hardware.cluster import Cluster
from .plans import Plan, PlanRequest, SearchResult
from .run_cost import Workload, in_words
from .strategies import search
from .suggestions import MOST_NODES


def in_time(
    request: PlanRequest, workload: Workload, hours: float, larger_nodes: bool = True
) -> tuple[PlanRequest, SearchResult]:
    """Return the smallest cluster of the request's GPUs on which the best plan meets the deadline, and its plans.

    Args:
        request: its cluster is the smallest one to try.
        workload: the tokens to train and the prices.
        hours: the deadline.
        larger_nodes: whether nodes may have more GPUs, unless they are rented instances of a fixed size.

    Raises:
        UserError: no cluster meets the deadline; the message names the fastest.
    """
    nearest: tuple[float, Cluster] | None = None
    slow: Cluster | None = None
    for cluster in _growing(request.cluster, larger_nodes):
        result = search(replace(request, cluster=cluster))
        if result.best is None:
            continue
        taken = workload.hours(result.best)
        if taken <= hours:
            return _fewest_nodes(request, workload, hours, slow, cluster, result)
        if nearest is None or taken < nearest[0]:
            nearest = taken, cluster
        slow = cluster
    if nearest is None:
        raise UserError(
            f"nothing fits on up to {MOST_NODES} nodes of {request.cluster.gpu.name}; plan without --deadline."
        )
    taken, cluster = nearest
    raise UserError(
        f"no cluster of up to {MOST_NODES} nodes of {request.cluster.gpu.name} finishes within {in_words(hours)}.\n"
        f"The fastest is {cluster.nodes} x {cluster.gpus_per_node} GPUs with {in_words(taken)}; a larger "
        "global_batch_size keeps more GPUs busy."
    )


def sentence(plan: Plan, workload: Workload, hours: float) -> str:
    """Return the number of GPUs and the time, with a warning if the slow end of the range misses the deadline."""
    taken, cluster = workload.hours(plan), plan.cluster
    slowest = taken * plan.speed / plan.speed_range[0]
    late = f", but up to {in_words(slowest)} within the range: take more GPUs to be safe" if slowest > hours else ""
    gpus = f"{cluster.gpus} GPU{'s' * (cluster.gpus > 1)} ({cluster.nodes} x {cluster.gpus_per_node})"
    return f"The fewest GPUs that finish within {in_words(hours)}: {gpus}, in {in_words(taken)}{late}."


def _growing(cluster: Cluster, larger_nodes: bool) -> Iterator[Cluster]:
    """Yield clusters of growing size: first more GPUs per node, except for instances, then doubled numbers of nodes."""
    each = cluster.gpus_per_node
    while larger_nodes and not cluster.instance and cluster.nodes == 1 and each < NODE:
        yield replace(cluster, gpus_per_node=each)
        each *= 2
    nodes = cluster.nodes
    while nodes <= MOST_NODES:
        yield replace(cluster, gpus_per_node=each, nodes=nodes)
        nodes *= 2


def _fewest_nodes(
    request: PlanRequest, workload: Workload, hours: float, slow: Cluster | None, fast: Cluster, result: SearchResult
) -> tuple[PlanRequest, SearchResult]:
    """Return the smallest cluster between one that is too slow and one that is fast enough, by bisection."""
    least = slow.nodes if slow and slow.gpus_per_node == fast.gpus_per_node else fast.nodes
    while fast.nodes - least > 1:
        between = replace(fast, nodes=(least + fast.nodes) // 2)
        found = search(replace(request, cluster=between))
        if found.best and workload.hours(found.best) <= hours:
            fast, result = between, found
        else:
            least = between.nodes
    return replace(request, cluster=fast), result
