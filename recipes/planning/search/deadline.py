"""How many GPUs a run needs to end in time."""

from collections.abc import Iterator
from dataclasses import replace

from ...spec.errors import UserError
from ..hardware.cluster import Cluster
from .plans import PlanRequest, SearchResult
from .run_cost import Workload
from .strategies import search
from .suggestions import MOST_NODES

NODE = 8
"""GPUs of a node, where no instance says how many it has."""


def in_time(request: PlanRequest, workload: Workload, hours: float) -> tuple[PlanRequest, SearchResult]:
    """Return the smallest cluster of the request's GPUs on which the best plan ends in time, and its plans.

    Raises:
        UserError: none does; with the one that comes nearest.
    """
    nearest: tuple[float, Cluster] | None = None
    slow: Cluster | None = None
    for cluster in _growing(request.cluster):
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
            f"nothing fits on up to {MOST_NODES} nodes of {request.cluster.gpu.name}; leave --deadline out."
        )
    taken, cluster = nearest
    raise UserError(
        f"no cluster of up to {MOST_NODES} nodes of {request.cluster.gpu.name} ends within {hours:g} h.\n"
        f"The nearest is {cluster.nodes} x {cluster.gpus_per_node} GPUs with {taken:,.1f} hours; a larger "
        "global_batch_size keeps more GPUs busy."
    )


def _growing(cluster: Cluster) -> Iterator[Cluster]:
    """Yield ever larger clusters: more GPUs in a node that is no instance, then twice as many nodes, and so on."""
    each = cluster.gpus_per_node
    while not cluster.instance and cluster.nodes == 1 and each < NODE:
        yield replace(cluster, gpus_per_node=each)
        each *= 2
    nodes = cluster.nodes
    while nodes <= MOST_NODES:
        yield replace(cluster, gpus_per_node=each, nodes=nodes)
        nodes *= 2


def _fewest_nodes(
    request: PlanRequest, workload: Workload, hours: float, slow: Cluster | None, fast: Cluster, result: SearchResult
) -> tuple[PlanRequest, SearchResult]:
    """Return the smallest number of nodes between one that is too slow and one that is fast enough."""
    least = slow.nodes if slow and slow.gpus_per_node == fast.gpus_per_node else fast.nodes
    while fast.nodes - least > 1:
        between = replace(fast, nodes=(least + fast.nodes) // 2)
        found = search(replace(request, cluster=between))
        if found.best and workload.hours(found.best) <= hours:
            fast, result = between, found
        else:
            least = between.nodes
    return replace(request, cluster=fast), result
