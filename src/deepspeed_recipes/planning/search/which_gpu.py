"""On which hardware of the catalogue a model can be trained: the smallest, and what each that has a price costs."""

import math
from dataclasses import dataclass, replace

from ..hardware.cluster import Cluster, of_instance
from ..hardware.gpus import DESKTOP
from ..hardware.instances import INSTANCES
from .plans import Plan, PlanRequest
from .run_cost import Workload
from .strategies import search

NODES = (1, 2, 4, 8, 16)
"""Of one instance, tried until the model fits and the run ends in time."""
TRIED = 3
"""Instances of which many nodes are tried, to say what comes nearest to a deadline."""
GAIN = 2
"""How much faster a GPU may get with more nodes, since its states are smaller and it recomputes less."""
LARGE = 8
"""GPUs of a node from which several make sense: smaller ones have slow networks."""
DESKTOP_HOST = 64.0
"""GiB of host memory in a computer of one's own."""


@dataclass(frozen=True)
class Choice:
    """Hardware with its best plan."""

    plan: Plan
    hours: float
    dollars: float | None
    """None: its price is unknown."""

    @property
    def cluster(self) -> Cluster:
        """The hardware."""
        return self.plan.cluster


def smallest(request: PlanRequest, workload: Workload, hours: float | None = None) -> Choice | None:
    """Return the hardware of the fewest GPUs, of those with the least memory, of those the cheapest, where a run fits.

    Args:
        request: whose cluster is ignored.
        workload: what is trained.
        hours: in which it is to end; None: however long it takes.
    """
    nodes = [*(Cluster(gpu, host_memory_gib=DESKTOP_HOST) for gpu in DESKTOP), *map(of_instance, INSTANCES)]

    def size(one: Cluster) -> tuple[float, ...]:
        price = workload.prices.per_hour(one) or math.inf
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
    """Return every instance that has a price with as many nodes as the run needs, the cheapest run first."""
    choices = [choice for name in workload.prices.known() if (choice := _on(name, request, workload, hours))]
    return sorted(choices, key=lambda choice: choice.dollars or 0)


def fastest(request: PlanRequest, workload: Workload) -> Choice | None:
    """Return the fastest run on the most nodes, of the instances that are fastest alone; None where nothing fits."""
    alone = sorted(by_price(request, workload), key=lambda choice: choice.hours)[:TRIED]
    many = [_choice(request, workload, replace(one.cluster, nodes=NODES[-1])) for one in alone]
    return min((one for one in (*alone, *many) if one), key=lambda choice: choice.hours, default=None)


def _on(name: str, request: PlanRequest, workload: Workload, hours: float | None) -> Choice | None:
    """Return the smallest number of nodes of an instance on which the run fits and ends in time."""
    node = of_instance(name)
    for nodes in NODES if node.gpus >= LARGE else NODES[:1]:
        choice = _choice(request, workload, replace(node, nodes=nodes))
        if choice and (hours is None or choice.hours <= hours):
            return choice
        if choice and hours and _is_hopeless(choice, hours):
            return None
    return None


def _is_hopeless(choice: Choice, hours: float) -> bool:
    """Return whether even the most nodes would be too slow, if each were `GAIN` times as fast as it is now."""
    return choice.hours > hours * GAIN * NODES[-1] / choice.cluster.nodes


def _choice(request: PlanRequest, workload: Workload, cluster: Cluster) -> Choice | None:
    best = search(replace(request, cluster=cluster)).best
    return Choice(best, workload.hours(best), workload.dollars(best)) if best else None
