"""Finds the catalogue's hardware for a run: the smallest that fits, and the price on every instance with a price."""

import math
from dataclasses import dataclass, replace

from ..hardware.cluster import Cluster, of_instance
from ..hardware.gpus import DESKTOP, DESKTOP_HOST
from ..hardware.instances import INSTANCES
from .plans import Plan, PlanRequest
from .run_cost import Workload
from .strategies import search

NODES = (1, 2, 4, 8, 16)
"""Numbers of nodes to try, until the model fits and the run meets the deadline."""
TRIED = 3
"""Number of instances to try with many nodes, to find the run that comes closest to a deadline."""
GAIN = 2
"""Largest gain in a GPU's speed from more nodes: its states shrink, so it recomputes less."""
LARGE = 8
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


def smallest(request: PlanRequest, workload: Workload, hours: float | None = None) -> Choice | None:
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
            if one.gpus < LARGE or (choice and hours and _is_hopeless(choice, hours)):
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
    for nodes in NODES if node.gpus >= LARGE else NODES[:1]:
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
