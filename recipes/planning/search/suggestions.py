"""What to change where nothing fits: another method, shorter sequences, tiles, more hardware; each tried by itself."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace

from ...spec import overrides, pages
from ...spec.errors import UserError
from ...spec.recipe import Recipe
from .model_recipe import METHODS, method_of, pinned
from .plans import REFUSE, PlanRequest, SearchResult
from .reasons import tightness
from .strategies import plan_request, search

MOST_NODES = 128
MOST_GPUS = 8
"""Of one node that is no instance."""
TILES = ("tiled_loss=true", "tiled_mlp=true")
OFFLOADED = ("activation_offloading=true",)
SHORTEST = 512
"""Tokens of a sequence; below it most conversations would be cut."""


def sentence(request: PlanRequest, result: SearchResult) -> str:
    """Return which plan comes nearest to fitting, and what would make one fit."""
    if result.tight:
        plan = result.tight[0]
        return f"nothing fits for sure; {plan.recipe.deepspeed} is {tightness(plan)}.\n{_what_would(request)}"
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
    short = nearest.shortfalls[0]
    return f"nothing fits; {nearest.recipe.deepspeed} comes nearest, with {short}.\n{_what_would(request)}"


def _what_would(request: PlanRequest) -> str:
    found = list(suggestions(request))
    if not found:
        return "Take a smaller model, or let --which-gpu find the hardware."
    return f"What would: {'; '.join(found)}."


def suggestions(request: PlanRequest) -> Iterator[str]:
    """Yield each change with which the model can be trained, as it is typed for plan.py; each was tried by itself."""
    yield from _methods(request)
    yield from _less_at_once(request)
    yield from _more_hardware(request)


def _methods(request: PlanRequest) -> Iterator[str]:
    """Yield the first variant with fewer states that fits: adapters, then 4-bit weights, then sharded ones."""
    frugal = METHODS.index(method_of(request.recipe))
    others = [
        other for name in pages.variants(pages.page_of(request.recipe)) if (other := with_method(request.recipe, name))
    ]
    for method in METHODS[frugal:]:
        for other in others:
            same = other.method == request.recipe.method and method_of(other) == method
            more = METHODS.index(method) > frugal or other.variant.startswith(f"{request.recipe.variant}_")
            if same and more and _fits(plan_request(other, request.cluster, pinned(other))):
                yield f"--method {other.variant}"
                return


def _less_at_once(request: PlanRequest) -> Iterator[str]:
    """Yield a smaller micro-batch where one is asked for, tiles, and the longest half, ... of the sequence that fit."""
    recipe = request.recipe
    size = recipe.micro_batch_size // 2 if "micro_batch_size" in request.fixed else 0
    while size:
        if _fits(replace(request, recipe=replace(recipe, micro_batch_size=size))):
            yield f"micro_batch_size={size}"
            break
        size //= 2
    if recipe.traits.whole_loss is None and not recipe.layout.pipeline > 1:
        for words in (TILES, OFFLOADED, TILES + OFFLOADED):
            with contextlib.suppress(UserError):  # what it does not go with
                if _fits(replace(request, recipe=overrides.apply(recipe, words))):
                    yield " ".join(words)
                    break
    length = recipe.sequence_length // 2
    while length >= SHORTEST:
        if _fits(replace(request, recipe=replace(recipe, sequence_length=length))):
            yield f"sequence_length={length}"
            return
        length //= 2


def _more_hardware(request: PlanRequest) -> Iterator[str]:
    """Yield more GPUs, host memory and drives."""
    cluster = request.cluster
    gpus = cluster.gpus_per_node * 2
    while not cluster.instance and cluster.nodes == 1 and gpus <= MOST_GPUS:
        if _fits(replace(request, cluster=replace(cluster, gpus_per_node=gpus))):
            yield f"--gpus {gpus}"
            break
        gpus *= 2
    else:
        nodes = cluster.nodes * 2
        while nodes <= MOST_NODES:
            if _fits(replace(request, cluster=replace(cluster, nodes=nodes))):
                yield f"--nodes {nodes}"
                break
            nodes *= 2
    if cluster.host_memory_gib:
        offloaded = search(replace(request, cluster=replace(cluster, host_memory_gib=0))).plans
        if offloaded:
            yield f"--host-memory {math.ceil(min(plan.host_gib for plan in offloaded) / REFUSE):.0f}"
    if not cluster.nvme_gib:
        best = search(replace(request, cluster=replace(cluster, nvme_gib=float("inf")))).best
        if best and best.nvme_gib:
            yield f"--nvme {math.ceil(best.nvme_gib / REFUSE):.0f}"


def _fits(request: PlanRequest) -> bool:
    return search(request).best is not None


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
