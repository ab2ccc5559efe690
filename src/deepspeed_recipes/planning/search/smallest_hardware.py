"""Finds the smallest hardware on which a recipe is predicted to fit without changes."""

import math
from collections.abc import Iterator
from dataclasses import replace

from ...recipe import limits
from ...recipe.layout import data_parallel_size
from ...recipe.recipe import Recipe
from ..hardware.cluster import Cluster
from ..hardware.gpus import find
from .plans import Plan
from .strategies import evaluate, plan_request, template

GPU = "H100"
"""The GPU of the configurations with several GPUs."""
SINGLE = ("RTX 4090", "L40S", GPU, "H200")
"""Single GPUs to try first."""
MOST = 2048
"""The largest number of GPUs to try."""


def smallest(recipe: Recipe) -> Plan | None:
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
    while gpus <= MOST:
        each = math.gcd(8, gpus)
        yield Cluster(find(GPU), each, gpus // each)
        gpus *= 2
