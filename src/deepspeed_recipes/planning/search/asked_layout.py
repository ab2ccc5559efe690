"""A layout that somebody asks for, beside what the planner would choose: its rank, or what DeepSpeed lacks for it."""

import math
from dataclasses import asdict, replace

from ...recipe import limits
from ...recipe.recipe import Layout
from .plans import Plan, PlanRequest, SearchResult
from .reasons import behind
from .strategies import evaluate, search

FILES = {"pipeline": "pipeline.json", "tensor": "tensor_parallel.json", "sequence": "sequence_parallel.json"}
"""In whose memory a layout that nothing runs is counted, by what it splits besides experts."""


def is_pinned(key: str) -> bool:
    """Return whether an override key says how ranks share the model."""
    return key == "deepspeed" or key.startswith("layout.")


def rank(request: PlanRequest, result: SearchResult) -> str | None:
    """Return where the best plan with the asked layout stands among those that the planner would choose from.

    None where it is the first of them, or where nothing fits at all.
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
        f"The layout that is asked for, beside the first: {behind(own, first)}."
    )


def added(request: PlanRequest, plan: Plan) -> str | None:
    """Return what the planner has split beside the sizes that are asked for; None: nothing."""
    sizes = {name: size for name, size in asdict(plan.recipe.layout).items() if size > 1}
    more = {name: size for name, size in sizes.items() if f"layout.{name}" not in request.fixed}
    if not more or not any(key.startswith("layout.") for key in request.fixed):
        return None
    what = " and ".join(f"{name} {size}" for name, size in more.items())
    whole = " ".join(f"layout.{name}=1" for name in more)
    return f"Beside what is asked for, the planner chose {what}; {whole} does without."


def beyond(request: PlanRequest, layout: Layout) -> str | None:
    """Return what DeepSpeed lacks to run experts that are split beside tensors, stages or sequences, and its cost.

    None for other layouts: what is wrong with them is in `recipe.limits`.

    Args:
        request: of a mixture of experts.
        layout: as it was asked for.
    """
    others = [name for name in FILES if getattr(layout, name) > 1]
    gpus, copies = request.cluster.gpus, layout.tensor * layout.pipeline * layout.sequence
    if layout.expert == 1 or not others or gpus % copies or gpus // layout.pipeline % layout.expert:
        return None
    batch = math.ceil(request.recipe.global_batch_size / (gpus // copies)) * (gpus // copies)
    file = FILES[others[0]]
    recipe = replace(request.recipe, layout=layout, deepspeed=file, micro_batch_size=1, global_batch_size=batch)
    plan, runs = evaluate(request, recipe), search(replace(request, fixed=frozenset())).best
    beside = f", beside {_cost(runs)} of {runs.recipe.deepspeed}, the best that runs" if runs else ""
    return (
        f"That takes expert parallelism folded over the ranks of a stage, as Megatron Core has it (arXiv:2504.14960): "
        f"by these costs {_cost(plan)}{beside}."
    )


def _cost(plan: Plan) -> str:
    return f"{plan.speed:,.0f} tokens/s/GPU with {plan.gpu_gib:,.0f} GiB"
