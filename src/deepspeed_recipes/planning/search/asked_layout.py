"""Compares a layout that the user set with the planner's own choice, or explains why DeepSpeed cannot run it."""

import math
from dataclasses import asdict, replace

from ...recipe import limits
from ...recipe.recipe import Layout
from .plans import Plan, PlanRequest, SearchResult
from .reasons import behind
from .strategies import evaluate, search

FILES = {"pipeline": "pipeline.json", "tensor": "tensor_parallel.json", "sequence": "sequence_parallel.json"}
"""DeepSpeed file used to cost a layout that cannot run, by the dimension that is split in addition to experts."""


def is_pinned(key: str) -> bool:
    """Return whether an override key decides how ranks share the model."""
    return key == "deepspeed" or key.startswith("layout.")


def rank(request: PlanRequest, result: SearchResult) -> str | None:
    """Return how the best plan with the requested layout compares with the plans of an unrestricted search.

    None if no unrestricted plan is faster, or if nothing fits.
    """
    free = search(replace(request, fixed=frozenset(key for key in request.fixed if not is_pinned(key))))
    first, own = free.best, next(iter((*result.plans, *result.tight)), None)
    if first is None or (own and own.speed >= first.speed):
        return None
    layout = limits.as_overrides(first.recipe.layout)
    better = f"deepspeed={first.recipe.deepspeed}{' ' if layout else ''}{layout}"
    reaches = f"{first.speed:,.0f} tokens/s/GPU with {first.gpu_gib:.0f} GiB"
    if own is None:
        return f"Left to the planner: {better}, {reaches}."
    faster = sum(plan.speed > own.speed for plan in free.plans)
    return (
        f"Left to the planner, {faster} plan{'s' * (faster > 1)} would be faster, the first with {better}: {reaches}. "
        f"The requested layout compared with the first: {behind(own, first)}."
    )


def added(request: PlanRequest, plan: Plan) -> str | None:
    """Return a sentence on the layout sizes that the planner added to the requested ones, or None if it added none."""
    sizes = {name: size for name, size in asdict(plan.recipe.layout).items() if size > 1}
    more = {name: size for name, size in sizes.items() if f"layout.{name}" not in request.fixed}
    if not more or not any(key.startswith("layout.") for key in request.fixed):
        return None
    what = " and ".join(f"{name} {size}" for name, size in more.items())
    whole = " ".join(f"layout.{name}=1" for name in more)
    return f"In addition to the requested layout, the planner chose {what}; {whole} turns that off."


def beyond(request: PlanRequest, layout: Layout) -> str | None:
    """Return what DeepSpeed lacks to combine expert parallelism with another kind, and what such a layout would reach.

    None for other layouts, which `recipe.limits` explains.

    Args:
        request: the model is a mixture of experts.
        layout: the requested layout.
    """
    others = [name for name in FILES if getattr(layout, name) > 1]
    gpus, copies = request.cluster.gpus, layout.tensor * layout.pipeline * layout.sequence
    if layout.expert == 1 or not others or gpus % copies or gpus // layout.pipeline % layout.expert:
        return None
    batch = math.ceil(request.recipe.global_batch_size / (gpus // copies)) * (gpus // copies)
    file = FILES[others[0]]
    recipe = replace(request.recipe, layout=layout, deepspeed=file, micro_batch_size=1, global_batch_size=batch)
    plan, runs = evaluate(request, recipe), search(replace(request, fixed=frozenset())).best
    runnable = f", compared with {_cost(runs)} for {runs.recipe.deepspeed}, the best plan that runs" if runs else ""
    return (
        f"This needs expert parallelism folded over the ranks of a stage, as Megatron Core has it (arXiv:2504.14960); "
        f"the predicted cost would be {_cost(plan)}{runnable}."
    )


def _cost(plan: Plan) -> str:
    return f"{plan.speed:,.0f} tokens/s/GPU with {plan.gpu_gib:,.0f} GiB"
