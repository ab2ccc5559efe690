"""What to change where nothing fits: another method, more nodes, a drive; each tried by itself."""

import math
from collections.abc import Iterator
from dataclasses import replace

from ...spec import overrides, pages
from ...spec.recipe import Recipe
from .model_recipe import METHODS, method_of
from .plans import REFUSE, PlanRequest, SearchResult
from .strategies import plan_request, search

MOST_NODES = 128


def sentence(request: PlanRequest, result: SearchResult) -> str:
    """Return which plan comes nearest to fitting, and what would make one fit."""
    if not result.rejected:
        batch, gpus = request.recipe.global_batch_size, request.cluster.gpus
        fixed = [key for key in sorted(request.fixed) if key == "deepspeed" or key.startswith("layout.")]
        if fixed:
            given = " ".join(overrides.as_typed(request.recipe, fixed))
            return f"{given}: this model cannot train like this on {gpus} GPUs; leave out what you do not need."
        return (
            f"no layout of {gpus} GPUs is possible: global_batch_size={batch} is not divisible by the data-parallel "
            f"size of any; try global_batch_size={math.ceil(batch / gpus) * gpus}."
        )
    nearest = min(result.rejected, key=lambda plan: plan.gpu_gib)
    found = list(suggestions(request))
    fits = f"What would: {'; '.join(found)}." if found else "Take a smaller model."
    return f"nothing fits; {nearest.recipe.deepspeed} comes nearest, with {nearest.shortfalls[0]}.\n{fits}"


def suggestions(request: PlanRequest) -> Iterator[str]:
    """Yield each change with which the model can be trained, as it is typed for plan.py."""
    for method in METHODS[METHODS.index(method_of(request.recipe)) + 1 :]:
        other = with_method(request.recipe, method)
        if other and search(plan_request(other, request.cluster)).best:
            yield f"--method {method}"
            break
    nodes = request.cluster.nodes * 2
    while nodes <= MOST_NODES:
        if search(replace(request, cluster=replace(request.cluster, nodes=nodes))).best:
            yield f"--nodes {nodes}"
            break
        nodes *= 2
    if not request.cluster.nvme_gib:
        best = search(replace(request, cluster=replace(request.cluster, nvme_gib=float("inf")))).best
        if best and best.nvme_gib:
            yield f"--nvme {math.ceil(best.nvme_gib / REFUSE):.0f}"


def with_method(recipe: Recipe, method: str) -> Recipe | None:
    """Return the recipe with another method of its page, on the same model and batch; None where the page has none."""
    if method not in pages.variants(pages.page_of(recipe)):
        return None
    other = pages.find(pages.typed(recipe), method)
    return replace(
        other,
        model=replace(recipe.model, quantization=other.model.quantization),
        sequence_length=recipe.sequence_length,
        global_batch_size=recipe.global_batch_size,
        micro_batch_size=1,
    )
