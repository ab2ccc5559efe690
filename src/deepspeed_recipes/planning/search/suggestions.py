"""What to change where nothing fits: another method, shorter sequences, tiles, more hardware; each tried by itself."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace

from ...recipe import overrides, pages
from ...recipe.errors import UserError
from ...recipe.limits import NODE
from .model_recipe import METHODS, method_of, pinned
from .plans import REFUSE, Plan, PlanRequest, SearchResult
from .reasons import tightness
from .strategies import plan_request, search

MOST_NODES = 128
TILES = ("tiled_loss=true", "tiled_mlp=true")
OFFLOADED = ("activation_offloading=true",)
FEW_GPUS = 64
"""Up to which other methods are searched, too: that takes tenths of a second each; a new model's profile, seconds."""
NARROW = ("layout.tensor", "layout.pipeline", "layout.sequence", "layout.expert", "micro_batch_size")
"""Settings of the user's that leave a plan little room."""
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
    asked = overrides.as_typed(request.recipe, [key for key in sorted(request.fixed) if key in NARROW])
    given = f" with {' '.join(asked)}" if asked else ""
    return (
        f"nothing fits{given}; {nearest.recipe.deepspeed} comes nearest, with {nearest.shortfalls[0]}.\n"
        f"{_what_would(request)}"
    )


def _what_would(request: PlanRequest) -> str:
    found = list(suggestions(request))
    if not found:
        return "Take a smaller model, or let --which-gpu find the hardware."
    return f"What would: {'; '.join(found)}."


def suggestions(request: PlanRequest) -> Iterator[str]:
    """Yield each change with which the model can be trained, as it is typed for ds-recipes plan, and its speed.

    Each was tried by itself, beside all that the user has set.
    """
    yield from _methods(request)
    yield from _less_at_once(request)
    yield from _more_hardware(request)


def other_methods(request: PlanRequest) -> str | None:
    """Return what other `METHODS` would reach; None for other variants, and where that would take seconds."""
    recipe = request.recipe
    if recipe.variant not in METHODS or request.cluster.gpus > FEW_GPUS or not pages.is_own_model(recipe):
        return None
    requests = {name: with_method(request, name) for name in METHODS if name != recipe.variant}
    found = {name: other and search(other).best for name, other in requests.items()}
    said = [
        f"--method {name}: {best.speed:,.0f}, {best.gpu_gib:.1f} GiB"
        + (f" with {best.host_gib:,.0f} GiB of host memory" if best.setup.offload_optimizer != "none" else "")
        for name, best in found.items()
        if best
    ]
    return f"By other methods, tokens/s/GPU and memory: {'; '.join(said)}." if said else None


def _methods(request: PlanRequest) -> Iterator[str]:
    """Yield the first variant with fewer states that fits: adapters, then 4-bit weights, then sharded ones."""
    frugal = METHODS.index(method_of(request.recipe))
    others = [other for name in pages.variants(pages.page_of(request.recipe)) if (other := with_method(request, name))]
    for method in METHODS[frugal:]:
        for other in others:
            variant = other.recipe.variant
            same = other.recipe.method == request.recipe.method and method_of(other.recipe) == method
            more = METHODS.index(method) > frugal or variant.startswith(f"{request.recipe.variant}_")
            if same and more and (found := _tried(f"--method {variant}", other)):
                yield found
                return


def _less_at_once(request: PlanRequest) -> Iterator[str]:
    """Yield a smaller micro-batch where one is asked for, tiles, and the longest half, ... of the sequence that fit."""
    recipe = request.recipe
    size = recipe.micro_batch_size // 2 if "micro_batch_size" in request.fixed else 0
    while size:
        if found := _tried(f"micro_batch_size={size}", replace(request, recipe=replace(recipe, micro_batch_size=size))):
            yield found
            break
        size //= 2
    if recipe.traits.whole_loss is None and not recipe.layout.pipeline > 1:
        for words in (TILES, OFFLOADED, TILES + OFFLOADED):
            with contextlib.suppress(UserError):  # what it does not go with
                if found := _tried(" ".join(words), replace(request, recipe=overrides.apply(recipe, words))):
                    yield found
                    break
    length = recipe.sequence_length // 2
    while length >= SHORTEST:
        if found := _tried(
            f"sequence_length={length}", replace(request, recipe=replace(recipe, sequence_length=length))
        ):
            yield found
            return
        length //= 2


def _more_hardware(request: PlanRequest) -> Iterator[str]:
    """Yield more GPUs, host memory and drives."""
    cluster = request.cluster
    gpus = cluster.gpus_per_node * 2
    while not cluster.instance and cluster.nodes == 1 and gpus <= NODE:
        if found := _tried(f"--gpus {gpus}", replace(request, cluster=replace(cluster, gpus_per_node=gpus))):
            yield found
            break
        gpus *= 2
    else:
        nodes = cluster.nodes * 2
        while nodes <= MOST_NODES:
            if found := _tried(f"--nodes {nodes}", replace(request, cluster=replace(cluster, nodes=nodes))):
                yield found
                break
            nodes *= 2
    if cluster.host_memory_gib:
        offloaded = search(replace(request, cluster=replace(cluster, host_memory_gib=0))).plans
        if offloaded:
            leanest = min(offloaded, key=lambda plan: plan.host_gib)
            yield f"--host-memory {math.ceil(leanest.host_gib / REFUSE):.0f} ({_speed(leanest)})"
    if not cluster.nvme_gib:
        best = search(replace(request, cluster=replace(cluster, nvme_gib=float("inf")))).best
        if best and best.nvme_gib:
            yield f"--nvme {math.ceil(best.nvme_gib / REFUSE):.0f} ({_speed(best)})"


def _tried(change: str, request: PlanRequest) -> str | None:
    """Return a change with the speed of its best plan; None where nothing fits with it."""
    best = search(request).best
    return f"{change} ({_speed(best)})" if best else None


def _speed(plan: Plan) -> str:
    return f"{plan.speed * plan.setup.world_size:,.0f} tokens/s"


def with_method(request: PlanRequest, variant: str) -> PlanRequest | None:
    """Return the request for another variant of the recipe's page, on the same model, batch and hardware.

    What the user has set stays, but for what the present variant is; None where the other does not go with it.
    """
    recipe, page = request.recipe, pages.find(pages.typed(request.recipe), request.recipe.variant)
    if variant not in pages.variants(pages.page_of(recipe)):
        return None
    other = pages.find(pages.typed(recipe), variant)
    other = replace(
        other,
        model=replace(recipe.model, quantization=other.model.quantization),
        sequence_length=recipe.sequence_length,
        global_batch_size=recipe.global_batch_size,
        micro_batch_size=1,
    )
    own = pinned(other)
    typed = request.fixed - pinned(page)
    if typed & own:
        return None
    words = [word for word in overrides.differences(page, recipe) if word.partition("=")[0] in typed]
    try:
        other = overrides.apply(other, words)
        return plan_request(other, request.cluster, typed | own)
    except UserError:
        return None
