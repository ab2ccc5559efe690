"""Finds the smallest and the cheapest hardware for a run, also with a deadline, and the longest sequence that fits."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from ...recipe import limits
from ...recipe.compatibility import positions
from ...recipe.errors import UserError, counted
from ...recipe.layout import data_parallel_size
from ...recipe.limits import NODE
from ...recipe.recipe import Recipe
from ..cost.constants import COUNTS
from ..hardware.cluster import Cluster, of_instance
from ..hardware.gpus import DESKTOP, DESKTOP_HOST, find
from ..hardware.instances import INSTANCES
from .plans import Plan, PlanRequest, SearchResult, Workload, in_words
from .strategies import Enough, evaluate, first, plan_request, template, until

MOST_NODES = 128
STEP = 1024
"""In tokens. Lengths are multiples of it, so that sequences can be split over ranks."""
MOST_TOKENS = 2**20
"""The longest sequence to try, in tokens, for a model whose positions are not limited."""
NODES = (1, 2, 4, 8, 16)
"""Numbers of nodes of the catalogue to try, until the model fits and the run meets the deadline."""
GPU = "H100"
"""The GPU of the configurations with several GPUs."""
SINGLE = ("RTX 4090", "L40S", GPU, "H200")
"""Single GPUs to try first."""
LARGEST = 2048
"""The largest number of GPUs to try."""


def growing(cluster: Cluster, larger_nodes: bool = True) -> Iterator[Cluster]:
    """Yield clusters of growing size: more GPUs per node, except for instances, then doubled numbers of nodes."""
    if cluster.on_cpus:  # its rates were measured for this number of ranks, and between machines for none
        yield cluster
        return
    each, nodes = cluster.gpus_per_node, cluster.nodes
    while larger_nodes and not cluster.instance and cluster.nodes == 1 and each < NODE:
        yield replace(cluster, gpus_per_node=each)
        each *= 2
    while nodes <= MOST_NODES:
        yield replace(cluster, gpus_per_node=each, nodes=nodes)
        nodes *= 2


def within(workload: Workload, hours: float) -> Enough:
    """Return the condition that the best plan takes at most so long."""
    return lambda found: found.best is not None and workload.hours(found.best) <= hours


def in_time(request: PlanRequest, workload: Workload, hours: float, larger_nodes: bool = True) -> SearchResult:
    """Return the plans on the smallest cluster of the request's GPUs on which the best plan meets the deadline.

    The request's cluster is the smallest one to try; with `larger_nodes` nodes may have more GPUs, unless they are
    rented instances of a fixed size.
    """

    def taken(found: SearchResult) -> float:
        return workload.hours(found.best) if found.best else math.inf

    enough = within(workload, hours)
    tried = until((replace(request, cluster=one) for one in growing(request.cluster, larger_nodes)), enough)
    cluster = tried[-1].request.cluster
    if enough(tried[-1]):
        slow = next((one for one in tried[-2::-1] if one.best), tried[-1]).request.cluster
        fewer = range(slow.nodes + 1, cluster.nodes) if slow.gpus_per_node == cluster.gpus_per_node else range(0)
        between = [replace(request, cluster=replace(cluster, nodes=nodes)) for nodes in fewer]
        return first(between, enough) or tried[-1]
    nearest, most = min(tried, key=taken), MOST_NODES if len(tried) > 1 else cluster.nodes
    most_nodes = f"up to {counted(most, 'node')} of {request.cluster.gpu.name}"
    if nearest.best is None:
        raise UserError(f"nothing fits on {most_nodes}; plan without --deadline.")
    cluster = nearest.request.cluster
    raise UserError(
        f"no cluster of {most_nodes} finishes within {in_words(hours)}.\n"
        f"The fastest is {cluster.nodes} x {cluster.gpus_per_node} GPUs with {in_words(taken(nearest))}; a larger "
        "global_batch_size keeps more GPUs busy."
    )


def longest(request: PlanRequest) -> SearchResult:
    """Return the plans for the longest sequence that fits, to within about 6 %.

    Offloading counts if it is known what room the host has, or if nothing fits without. If nothing fits at all, the
    sequence has `STEP` tokens. The search goes down from the model's maximum number of positions: a short sequence can
    need more memory than a long one, whose loss is computed in tiles.
    """

    def at(thousands: Iterable[int]) -> list[PlanRequest]:
        return [replace(request, recipe=replace(request.recipe, sequence_length=STEP * one)) for one in thousands]

    def fits(offloads: bool, found: SearchResult) -> bool:
        return found.best is not None and (offloads or not found.best.tier)

    known = request.cluster.host_memory_gib > 0 or "deepspeed" in request.fixed
    most = max(1, int(min(positions(request.recipe.model.config), MOST_TOKENS)) // STEP)
    halves = [most >> times for times in range(most.bit_length())]
    for enough in (partial(fits, known), partial(fits, True)):
        tried = until(at(halves), enough)
        if known or enough(tried[-1]):
            break
    least, too_long = halves[len(tried) - 1], halves[max(0, len(tried) - 2)]
    return first(at(range(least, too_long, max(1, least // 16))[:0:-1]), enough) or tried[-1]


def smallest_hardware(request: PlanRequest, workload: Workload, hours: float | None = None) -> Plan | None:
    """Return the best plan on the fewest GPUs on which a run fits; ties go to less GPU memory, then to a lower price.

    The request's cluster is ignored; `hours` is the deadline, if there is one.
    """
    nodes = [*(Cluster(gpu, host_memory_gib=DESKTOP_HOST) for gpu in DESKTOP), *map(of_instance, INSTANCES)]

    def size(one: Cluster) -> tuple[float, ...]:
        price = workload.per_hour(one) or math.inf
        return one.gpus, round(one.gpu.memory_gib), bool(one.instance), price, one.host_memory_gib

    return _first(request, workload, sorted(nodes, key=size), hours)


def by_price(request: PlanRequest, workload: Workload, hours: float | None = None) -> list[Plan]:
    """Return the best plan on every instance with a price, with as many nodes as it needs, the cheapest run first."""
    found = (_first(request, workload, [of_instance(name)], hours) for name in workload.prices.known())
    return sorted((plan for plan in found if plan), key=lambda plan: workload.dollars(plan) or 0)


def _first(request: PlanRequest, workload: Workload, nodes: Sequence[Cluster], hours: float | None) -> Plan | None:
    """Return the best plan on the fewest of the first of these nodes that suffice, or None."""
    enough = within(workload, hours or math.inf)
    for count in NODES:
        tried = until((replace(request, cluster=replace(one, nodes=count)) for one in nodes), enough)
        if tried and enough(tried[-1]):
            return tried[-1].best
        # Even the largest number of nodes would be too slow, with each node `COUNTS.gain` times as fast.
        hopeful = within(workload, (hours or math.inf) * COUNTS.gain * NODES[-1] / count)
        left = zip(nodes, tried, strict=True)
        nodes = [one for one, found in left if one.gpus >= COUNTS.large_node and (hopeful(found) or not found.best)]
    return None


def smallest_unchanged(recipe: Recipe) -> Plan | None:
    """Return the plan of an unchanged recipe on the smallest hardware on which it fits, or None if it fits on none.

    If there are more GPUs than sequences in the batch, each GPU gets one micro-batch.
    """
    layout = recipe.layout
    gpus = math.lcm(layout.tensor * layout.pipeline * layout.sequence, layout.expert)
    clusters = [Cluster(find(name)) for name in SINGLE] if gpus == 1 else []
    gpus = max(2, gpus)
    while gpus <= LARGEST:
        each = math.gcd(8, gpus)
        clusters.append(Cluster(find(GPU), each, gpus // each))
        gpus *= 2
    return next((plan for cluster in clusters if (plan := plan_on(recipe, cluster)) and plan.fits), None)


def plan_on(recipe: Recipe, cluster: Cluster) -> Plan | None:
    """Return the plan of an unchanged recipe on a cluster, or None if it cannot be distributed over the GPUs."""
    ranks = data_parallel_size(recipe.layout, cluster.gpus)
    if ranks < 1:
        return None
    sized = replace(recipe, global_batch_size=math.lcm(recipe.global_batch_size, recipe.micro_batch_size * ranks))
    if limits.limit(sized, cluster.gpus, template(recipe.deepspeed, cluster)) is not None:
        return None
    return evaluate(plan_request(sized, cluster), sized)
