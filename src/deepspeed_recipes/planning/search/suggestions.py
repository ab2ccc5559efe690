"""Suggests changes: what makes a run fit, what makes it faster, and how a layout that the user set compares."""

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ...recipe import limits, overrides, pages
from ...recipe.errors import UserError
from ..cost.constants import COUNTS
from .extremes import growing
from .model_recipe import METHODS, method_of, pinned
from .plans import Plan, PlanRequest, SearchResult
from .reasons import behind, tightness
from .strategies import plan_request, search

TILES, OFFLOADED = "tiled_loss=true tiled_mlp=true", "activation_offloading=true"
NARROW = ("layout.tensor", "layout.pipeline", "layout.sequence", "layout.expert", "micro_batch_size")
"""Settings that restrict the search most if the user fixes them."""

Changes = Iterator[tuple[str, PlanRequest]]
"""Changes as options of ds-recipes plan, each with the changed request, the smallest change first."""


def sentence(result: SearchResult) -> str:
    """Return which plan comes closest to fitting, and which changes would make one fit."""
    request = result.request
    recipe, fixed = request.recipe, sorted(request.fixed)
    if not result.tight and not result.rejected:
        batch, gpus = recipe.global_batch_size, request.cluster.gpus
        if not (keys := [key for key in fixed if is_layout_key(key)]):
            return (
                f"no layout of {gpus} GPUs is possible: no layout's data-parallel size divides global_batch_size="
                f"{batch}; try global_batch_size={request.shared_batch}."
            )
        more = "".join(f"try {way}, a sequence for every GPU, or " for way in _first_fit(_larger_batch(request)))
        given = " ".join(overrides.as_typed(recipe, keys))
        return f"{given}: this model cannot train like this on {gpus} GPUs; {more}remove the settings you do not need."
    found = "; ".join(suggestions(request))
    would = f"What would fit: {found}." if found else "Use a smaller model, or find suitable hardware with --which-gpu."
    if result.tight:
        plan = result.tight[0]
        return f"nothing is certain to fit; {plan.recipe.deepspeed} is {tightness(plan)}.\n{would}"
    nearest = min(result.rejected, key=lambda plan: plan.excess)
    restricting = overrides.as_typed(recipe, [key for key in fixed if key in NARROW])
    given = f" with {' '.join(restricting)}" if restricting else ""
    return f"nothing fits{given}; {nearest.recipe.deepspeed} comes closest, with {nearest.shortfalls[0]}.\n{would}"


def suggestions(request: PlanRequest) -> Iterator[str]:
    """Yield each change that makes training possible, as an option of ds-recipes plan, with the resulting speed.

    Each change is tried alone; all other settings of the user stay as they are.
    """
    recipe, cluster = request.recipe, request.cluster
    micro_batch = recipe.micro_batch_size if "micro_batch_size" in request.fixed else 1
    tiles = recipe.method.whole_loss is None and not recipe.layout.pipeline > 1
    for kind in (
        _larger_batch(request),
        _methods(request),
        _settings(request, [f"micro_batch_size={size}" for size in _halves(micro_batch, 1)]),
        _settings(request, (TILES, OFFLOADED, f"{TILES} {OFFLOADED}") if tiles else ()),
        _settings(request, [f"sequence_length={size}" for size in _halves(recipe.sequence_length, COUNTS.shortest)]),
        _more_gpus(request),
    ):
        yield from _first_fit(kind)
    unlimited = replace(request, cluster=replace(cluster, host_memory_gib=0))
    if cluster.host_memory_gib and (offloaded := search(unlimited).plans):
        leanest = min(offloaded, key=lambda plan: plan.memory.host_gib)
        yield f"--host-memory {math.ceil(leanest.memory.host_gib / COUNTS.usable):.0f} ({_speed(leanest)})"
    if not cluster.nvme_gib:
        best = search(replace(request, cluster=replace(cluster, nvme_gib=math.inf))).best
        if best and best.memory.nvme_gib:
            yield f"--nvme {math.ceil(best.memory.nvme_gib / COUNTS.usable):.0f} ({_speed(best)})"


def _first_fit(changes: Iterable[tuple[str, PlanRequest]]) -> Iterator[str]:
    """Yield the first change with which anything fits, with the speed of its best plan."""
    for change, request in changes:
        with contextlib.suppress(UserError):  # the change contradicts what the search would try
            if best := search(request).best:
                yield f"{change} ({_speed(best)})"
                return


def _speed(plan: Plan) -> str:
    return f"{plan.speed * plan.setup.world_size:,.0f} tokens/s"


def _larger_batch(request: PlanRequest) -> Changes:
    """Yield a batch with a sequence for every GPU, if there are more GPUs than sequences and the batch is not set."""
    gpus, recipe = request.cluster.gpus, request.recipe
    if recipe.global_batch_size < gpus and "global_batch_size" not in request.fixed:
        batch = request.shared_batch
        yield f"global_batch_size={batch}", replace(request, recipe=replace(recipe, global_batch_size=batch))


def _methods(request: PlanRequest) -> Changes:
    """Yield the variants with smaller states: adapters, then 4-bit weights, then sharded weights."""
    frugal = METHODS.index(method_of(request.recipe))
    others = [other for name in pages.variants(pages.page_of(request.recipe)) if (other := with_method(request, name))]
    for method in METHODS[frugal:]:
        for other in others:
            variant = other.recipe.variant
            same = other.recipe.method.name == request.recipe.method.name and method_of(other.recipe) == method
            if same and (METHODS.index(method) > frugal or variant.startswith(f"{request.recipe.variant}_")):
                yield f"--method {variant}", other


def _settings(request: PlanRequest, changes: Iterable[str]) -> Changes:
    """Yield each of these settings that the recipe allows."""
    for words in changes:
        with contextlib.suppress(UserError):
            yield words, replace(request, recipe=overrides.apply(request.recipe, words.split()))


def _halves(size: int, least: float) -> Iterator[int]:
    while (size := size // 2) >= least:
        yield size


def _more_gpus(request: PlanRequest) -> Changes:
    cluster = request.cluster
    for larger in (one for one in growing(cluster) if one != cluster):
        gpus = [f"--gpus {larger.gpus_per_node}"] if larger.gpus_per_node != cluster.gpus_per_node else []
        nodes = [f"--nodes {larger.nodes}"] if larger.nodes != cluster.nodes else []
        yield " ".join(gpus + nodes), replace(request, cluster=larger)


def remarks(request: PlanRequest, best: Plan) -> Iterator[str]:
    """Yield how the best plan compares with one node, a larger batch and other methods.

    Other methods are not searched for other variants than `METHODS`, and not where that would take seconds.
    """
    recipe, nodes = request.recipe, request.cluster.nodes
    if nodes > 1 and (alone := search(replace(request, cluster=replace(request.cluster, nodes=1))).best):
        yield (
            f"Efficiency: {best.speed / alone.speed:.0%} of one node's {alone.speed:,.0f} tokens/s/GPU; {nodes} nodes "
            f"are {nodes * best.speed / alone.speed:.1f} times as fast as one."
        )
    for change, larger in _larger_batch(request):
        found = search(larger).best
        if found and found.speed >= best.speed:
            yield (
                f"With {change}, a sequence for every GPU, {found.recipe.deepspeed} would reach {found.speed:,.0f} "
                f"tokens/s/GPU, {found.speed / best.speed:.1f} times as many; adapt the learning rate."
            )
    if recipe.variant not in METHODS or request.cluster.gpus > COUNTS.few_gpus or not pages.is_own_model(recipe):
        return
    parts = []
    for name in METHODS:
        other = with_method(request, name) if name != recipe.variant else None
        if plan := other and search(other).best:
            host = f" with {plan.memory.host_gib:,.0f} GiB of host memory"
            offloads = plan.setup.offload_optimizer != "none"
            parts.append(f"--method {name}: {plan.speed:,.0f}, {plan.gpu_gib:.1f} GiB{host if offloads else ''}")
    if parts:
        yield f"Other methods with this batch, in tokens/s/GPU and memory: {'; '.join(parts)}."


def with_method(request: PlanRequest, variant: str) -> PlanRequest | None:
    """Return the request for another variant of the recipe's page, with the same model, batch and hardware.

    The user's settings are kept, except those that define the current variant; None if the other contradicts them.
    """
    recipe, page = request.recipe, pages.find(pages.typed(request.recipe), request.recipe.variant)
    if variant not in pages.variants(pages.page_of(recipe)):
        return None
    other = pages.find(pages.typed(recipe), variant)
    own = pinned(other)
    typed = request.fixed - pinned(page)
    if typed & own:
        return None
    words = [word for word in overrides.differences(page, recipe) if word.partition("=")[0] in typed]
    try:
        other = replace(
            other,
            model=replace(recipe.model, quantization=other.model.quantization),
            sequence_length=recipe.sequence_length,
            global_batch_size=recipe.global_batch_size,
            micro_batch_size=1,
        )
        return plan_request(overrides.apply(other, words), request.cluster, typed | own)
    except UserError:
        return None


def is_layout_key(key: str) -> bool:
    """Return whether an override key decides how ranks share the model."""
    return key == "deepspeed" or key.startswith("layout.")


def asked_compared(result: SearchResult) -> str | None:
    """Return how the best plan with the requested layout compares with the plans of an unrestricted search.

    None if no unrestricted plan is faster, or if nothing fits.
    """
    fixed = frozenset(key for key in result.request.fixed if not is_layout_key(key))
    free = search(replace(result.request, fixed=fixed))
    first, own = free.best, next(iter((*result.plans, *result.tight)), None)
    if first is None or (own and own.speed >= first.speed):
        return None
    better = " ".join([f"deepspeed={first.recipe.deepspeed}", *limits.as_overrides(first.recipe.layout).split()])
    told = f"Left to the planner: {better}, {first.speed:,.0f} tokens/s/GPU with {first.gpu_gib:.0f} GiB."
    return f"{told} The requested layout compared with the first: {behind(own, first)}." if own else told
