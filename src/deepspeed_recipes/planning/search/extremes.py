"""Finds the smallest and the cheapest hardware for a run, also with a deadline, and the longest sequence that fits."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ...recipe import limits
from ...recipe.compatibility import positions
from ...recipe.errors import UserError
from ...recipe.layout import data_parallel_size
from ...recipe.limits import NODE
from ...recipe.recipe import Recipe
from ..hardware.cluster import Cluster, of_instance
from ..hardware.gpus import DESKTOP, DESKTOP_HOST, find
from ..hardware.instances import INSTANCES
from .plans import Plan, PlanRequest, SearchResult, Workload, in_words
from .strategies import evaluate, plan_request, search, template

MOST_NODES = 128
STEP = 1024
"""In tokens. Lengths are multiples of it, so that sequences can be split over ranks."""
MOST_TOKENS = 2**20
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

    too_long = fits = max(1, int(min(positions(request.recipe.model.config), MOST_TOKENS)) // STEP)
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


NODES = (1, 2, 4, 8, 16)
"""Numbers of nodes to try, until the model fits and the run meets the deadline."""
TRIED = 3
"""Number of instances to try with many nodes, to find the run that comes closest to a deadline."""
GAIN = 2
"""Largest gain in a GPU's speed from more nodes: its states shrink, so it recomputes less."""
LARGE_NODE = 8
"""Minimum GPUs per node for runs on several nodes: smaller nodes have slow networks."""


@dataclass(frozen=True)
class Choice:
    """Hardware with its best plan."""

    plan: Plan
    hours: float
    dollars: float | None
    """None if the price of the hardware is unknown."""

    @property
    def cluster(self) -> Cluster:
        """The hardware."""
        return self.plan.cluster


def smallest_choice(request: PlanRequest, workload: Workload, hours: float | None = None) -> Choice | None:
    """Return the hardware with the fewest GPUs on which a run fits; ties go to less GPU memory, then to a lower price.

    Args:
        request: the request, whose cluster is ignored.
        workload: the tokens to train and the prices.
        hours: the deadline, or None for no deadline.
    """
    nodes = [*(Cluster(gpu, host_memory_gib=DESKTOP_HOST) for gpu in DESKTOP), *map(of_instance, INSTANCES)]

    def size(one: Cluster) -> tuple[float, ...]:
        price = workload.per_hour(one) or math.inf
        return one.gpus, round(one.gpu.memory_gib), bool(one.instance), price, one.host_memory_gib

    ordered = sorted(nodes, key=size)
    for count in NODES:
        slow = []
        for one in ordered:
            choice = _choice(request, workload, replace(one, nodes=count))
            if choice and (hours is None or choice.hours <= hours):
                return choice
            if one.gpus < LARGE_NODE or (choice and hours and _is_hopeless(choice, hours)):
                slow.append(one)
        ordered = [one for one in ordered if one not in slow]
    return None


def by_price(request: PlanRequest, workload: Workload, hours: float | None = None) -> list[Choice]:
    """Return every instance with a price, with as many nodes as the run needs, the cheapest run first."""
    choices = [choice for name in workload.prices.known() if (choice := _on(name, request, workload, hours))]
    return sorted(choices, key=lambda choice: choice.dollars or 0)


def fastest(request: PlanRequest, workload: Workload) -> Choice | None:
    """Return the fastest run, with up to the most nodes of the fastest instances, or None if nothing fits."""
    alone = sorted(by_price(request, workload), key=lambda choice: choice.hours)[:TRIED]
    many = [_choice(request, workload, replace(one.cluster, nodes=NODES[-1])) for one in alone]
    return min((one for one in (*alone, *many) if one), key=lambda choice: choice.hours, default=None)


def _on(name: str, request: PlanRequest, workload: Workload, hours: float | None) -> Choice | None:
    """Return the smallest number of nodes of an instance on which the run fits and meets the deadline, or None."""
    node = of_instance(name)
    for nodes in NODES if node.gpus >= LARGE_NODE else NODES[:1]:
        choice = _choice(request, workload, replace(node, nodes=nodes))
        if choice and (hours is None or choice.hours <= hours):
            return choice
        if choice and hours and _is_hopeless(choice, hours):
            return None
    return None


def _is_hopeless(choice: Choice, hours: float) -> bool:
    """Return whether even the largest number of nodes would be too slow, with each node `GAIN` times as fast."""
    return choice.hours > hours * GAIN * NODES[-1] / choice.cluster.nodes


def _choice(request: PlanRequest, workload: Workload, cluster: Cluster) -> Choice | None:
    best = search(replace(request, cluster=cluster)).best
    return Choice(best, workload.hours(best), workload.dollars(best)) if best else None


GPU = "H100"
"""The GPU of the configurations with several GPUs."""
SINGLE = ("RTX 4090", "L40S", GPU, "H200")
"""Single GPUs to try first."""
LARGEST = 2048
"""The largest number of GPUs to try."""


def smallest_unchanged(recipe: Recipe) -> Plan | None:
    """Return the plan of an unchanged recipe on the smallest hardware on which it fits, or None if it fits on none.

    If there are more GPUs than sequences in the batch, each GPU gets one micro-batch.
    """
    layout = recipe.layout
    clusters = ladder(math.lcm(layout.tensor * layout.pipeline * layout.sequence, layout.expert))
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


def ladder(gpus: int) -> Iterator[Cluster]:
    """Yield the hardware to try for a layout of `gpus` GPUs: if it is one, single GPUs first; then doubled numbers."""
    if gpus == 1:
        yield from (Cluster(find(name)) for name in SINGLE)
        gpus = 2
    while gpus <= LARGEST:
        each = math.gcd(8, gpus)
        yield Cluster(find(GPU), each, gpus // each)
        gpus *= 2
