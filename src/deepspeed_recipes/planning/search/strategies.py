"""Searches all feasible ways to train a model on a cluster, and returns them best first.

A candidate is a file in `configs/`, a layout, a micro-batch size and whether to checkpoint. The launcher's own rules
(`recipe.limits`) drop those that cannot run, `cost.memory` those that do not fit, and `cost.step_time` ranks the rest.
"""

import copy
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from itertools import product
from pathlib import Path

from ...recipe import deepspeed_file, limits
from ...recipe.deepspeed_file import DeepSpeedFile
from ...recipe.errors import UserError
from ...recipe.layout import data_parallel_size
from ...recipe.project import CONFIGS
from ...recipe.recipe import Layout, Precision, Recipe, changed
from ..cost.constants import COUNTS
from ..cost.memory import peak_memory
from ..cost.training_setup import OWN, TrainingSetup, training_setup
from ..hardware.cluster import Cluster
from ..model_profile.lookup import profile_of
from . import plans
from .plans import Plan, PlanRequest, SearchResult

Enough = Callable[[SearchResult], bool]
"""Says whether a search over several requests has found what it looks for."""


def plan_request(
    recipe: Recipe, cluster: Cluster, fixed: Iterable[str] = (), document_length: float | None = None
) -> PlanRequest:
    """Return the request to plan a recipe on a cluster, with its model's profile.

    Raises:
        UserError: transformers has no such decoder, the decoder cannot have such adapters, or the method refuses the
            micro-batch.
    """
    keys = frozenset(fixed)
    if "micro_batch_size" in keys:
        limits.check_micro_batch(recipe)
    profile = profile_of(recipe.model.config, recipe.lora)
    if recipe.model.train_mtp:
        profile = profile.with_further_token()
    return PlanRequest(recipe, profile, cluster, keys, document_length)


def search(request: PlanRequest) -> SearchResult:
    """Return the plans that fit, the tight plans, and for each other file the plan that comes closest to fitting.

    After the first tier in which anything fits, a tier's best plan is kept if none is as fast with as little memory.
    """
    recipe, gpu, gpus = request.recipe, request.cluster.gpu, request.cluster.gpus
    if "global_batch_size" not in request.fixed and gpus <= recipe.global_batch_size:
        recipe = replace(recipe, global_batch_size=request.shared_batch, micro_batch_size=request.least_micro_batch)
    if recipe.precision == "bf16" and not gpu.bf16:
        other: Precision = "fp32" if request.cluster.on_cpus else "fp16"
        if "precision" in request.fixed:
            raise UserError(f"precision=bf16: {gpu.name} has no bf16; write precision={other}, or leave it out.")
        recipe = replace(recipe, precision=other)
    asked, request = request, replace(request, recipe=recipe)
    fitting: list[Plan] = []
    others: list[Plan] = []
    for tier in ((recipe.deepspeed,),) if "deepspeed" in request.fixed else plans.TIERS:
        if fitting and tier == plans.LAST_RESORT:
            break
        found = list(_candidates(request, tier))
        fits = [plan for plan in found if plan.fits]
        if fitting:
            fitting += [plan for plan in plans.ranked(fits)[:1] if not plans.is_dominated(plan, fitting)]
            continue
        enough = tier == plans.LAST_RESORT and any(plan.tight for plan in others)
        fitting, others = fits, others + [plan for plan in found if plan.shortfalls or (plan.tight and not enough)]
    tight = [plan for plan in others if plan.tight and not plans.is_dominated(plan, fitting)]
    used = {plan.base.deepspeed for plan in (*fitting, *tight)}
    by_file: dict[str, list[Plan]] = {}
    for plan in others:
        if plan.shortfalls and plan.base.deepspeed not in used:
            by_file.setdefault(plan.base.deepspeed, []).append(plan)
    nearest = (min(each, key=lambda plan: plan.excess) for each in by_file.values())
    # Offloading comes last, however fast it is predicted.
    ordered = sorted(plans.ranked(fitting), key=lambda plan: plan.tier > 0)
    return SearchResult(asked, tuple(ordered), tuple(_with_room_first(tight)), tuple(nearest))


def until(requests: Iterable[PlanRequest], enough: Enough) -> list[SearchResult]:
    """Search for one request after another until a result is enough, and return all results, that one last."""
    tried: list[SearchResult] = []
    for request in requests:
        tried.append(search(request))
        if enough(tried[-1]):
            break
    return tried


def first(requests: Sequence[PlanRequest], enough: Enough) -> SearchResult | None:
    """Return the first result that is enough, or None; the results after it have to be enough as well."""
    results = cache(lambda number: search(requests[number]))
    number = bisect_left(range(len(requests)), True, key=lambda number: enough(results(number)))
    return results(number) if number < len(requests) else None


def _candidates(request: PlanRequest, tier: Sequence[str]) -> Iterator[Plan]:
    """Yield a tier's best plan for each file and layout, or the best tight plan, and all plans that do not fit."""
    batch, gpus = request.recipe.global_batch_size, request.cluster.gpus
    # Every file with each group of layouts that differ only in sequence parallelism, smallest first.
    for layouts, name in product(_layouts(request), tier):
        wide: list[Plan] = []
        others: list[Plan] = []
        for layout in layouts:
            data_parallel = data_parallel_size(layout, gpus)
            if not data_parallel or batch % data_parallel or not _suits(name, layout, request):
                continue
            recipe = changed(request.recipe, deepspeed=name, layout=layout, micro_batch_size=1)
            if recipe is None or limits.limit(recipe, gpus, template(name, request.cluster)) is not None:
                continue
            sized = list(_sized(request, recipe))
            if fits := plans.ranked([plan for plan in sized if plan.fits]):
                if wide and fits[0].speed <= wide[-1].speed:
                    break  # splitting sequences further no longer makes it faster
                wide.append(fits[0])
            others += [plan for plan in sized if not plan.fits]
        yield from wide or _with_room_first([plan for plan in others if plan.tight])[:1]
        yield from (plan for plan in others if plan.shortfalls)


def _with_room_first(tight: Sequence[Plan]) -> list[Plan]:
    """Return the plans, best first, at the end those likely to fill more than `COUNTS.usable` of a GPU."""
    return sorted(plans.ranked(tight), key=lambda plan: plan.gpu_gib > COUNTS.usable * plan.cluster.gpu.memory_gib)


def evaluate(request: PlanRequest, recipe: Recipe) -> Plan:
    """Return the plan of a recipe without changing it; `recipe.deepspeed` may be a path."""
    return _plan(request, recipe, _setup(request, recipe))


def _setup(request: PlanRequest, recipe: Recipe) -> TrainingSetup:
    setup = training_setup(recipe, template(recipe.deepspeed, request.cluster), request.cluster.gpus)
    tiled = setup.tiled_loss if request.software == OWN else bool(setup.tiled_loss)  # others tile on request alone
    return replace(setup, software=request.software, tiled_loss=tiled, document_length=request.document_length)


def _plan(request: PlanRequest, recipe: Recipe, setup: TrainingSetup) -> Plan:
    memory = peak_memory(request.profile, setup, request.cluster)
    return Plan(recipe, setup, request.cluster, request.profile, memory, plans.shortfalls(memory, request.cluster))


def template(deepspeed: str, cluster: Cluster) -> DeepSpeedFile:
    """Return a DeepSpeed file by its name in `configs/` or its path. The groups of hpZ get the size of the nodes."""
    file = _read(deepspeed)
    if deepspeed != "zero3_hpz.json":
        return file
    return deepspeed_file.with_zero(file, zero_hpz_partition_size=cluster.gpus_per_node)


@cache
def _read(deepspeed: str) -> DeepSpeedFile:
    for path in (CONFIGS / deepspeed, Path(deepspeed)):
        if path.is_file():
            return deepspeed_file.read(path)
    known = [path.name for path in CONFIGS.glob("*.json")]
    near = get_close_matches(deepspeed, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"configs/ holds {', '.join(sorted(known))}."
    raise UserError(f"deepspeed={deepspeed}: no such file; {hint}")


def _layouts(request: PlanRequest) -> Iterator[list[Layout]]:
    """Yield every sensible layout. Tensor parallelism stays inside a node, where links are fast."""
    asked, world_size = request.recipe.layout, request.cluster.gpus

    def sizes(name: str, most: int) -> list[int]:
        return [getattr(asked, name)] if f"layout.{name}" in request.fixed else limits.divisors(most)

    experts = asked.expert if "layout.expert" in request.fixed else 1
    for tensor in sizes("tensor", request.cluster.gpus_per_node) if experts == 1 else []:
        for pipeline in sizes("pipeline", world_size // tensor):
            if pipeline <= COUNTS.most_stages:
                sequences = sizes("sequence", world_size // tensor // pipeline)
                layouts = [Layout(tensor, pipeline, sequence) for sequence in sequences]
                yield [one for one in layouts if world_size % (tensor * pipeline * one.sequence) == 0]
    if request.profile.is_moe:
        yield from ([Layout(expert=expert)] for expert in sizes("expert", world_size) if expert > 1)


def _suits(name: str, layout: Layout, request: PlanRequest) -> bool:
    recipe, cluster, file = request.recipe, request.cluster, _read(name)
    if "deepspeed" in request.fixed:
        blocks = file.has_tensor_block <= (layout.tensor > 1) and file.has_expert_block == (layout.expert > 1)
        return blocks and (name != "pipeline.json" or layout.pipeline > 1)
    if recipe.model.quantization != "none" and name.startswith("zero3") and name != "zero3_adapters.json":
        return False  # packed weights are not offloaded
    if layout.pipeline > 1 or layout.expert > 1:
        return name == ("pipeline.json" if layout.pipeline > 1 else "expert_parallel.json")
    if name in plans.LAST_RESORT and recipe.precision != "bf16":
        return False
    zero3 = "zero3_moe.json" if request.profile.is_moe else "zero3_adapters.json" if recipe.lora else "zero3.json"
    if layout.tensor > 1:
        return name in ("tensor_parallel.json", "zero2.json", zero3)
    if layout.sequence > 1:
        some = ("sequence_parallel.json" if zero3 == "zero3.json" else zero3,)
    else:
        hpz = cluster.nodes > 1 and cluster.gpus_per_node > 1
        some = ("zero0.json", zero3, *(("zero3_hpz.json",) if hpz else ()))
    return name in ("zero1.json", "zero2.json", *some, *plans.SIMPLICITY[len(plans.TIERS[0]) :])


def _sized(request: PlanRequest, recipe: Recipe) -> Iterator[Plan]:
    """Yield plans for every micro-batch size that fits, with and without checkpointing, or the smallest if none fits.

    Memory grows with the micro-batch, and checkpointing never adds to it, so the first size that does not fit is last.
    """
    setup = _setup(request, recipe)
    sequences = recipe.global_batch_size // setup.data_parallel_size
    least, asked = request.recipe.method.least_micro_batch, request.recipe.micro_batch_size
    tried = [asked] if "micro_batch_size" in request.fixed else range(1, min(sequences, int(COUNTS.most_sequences)) + 1)
    sizes = [size for size in tried if size >= least and sequences % size == 0]
    fixed = recipe.gradient_checkpointing if "gradient_checkpointing" in request.fixed else None
    for checkpointing in (True, False) if fixed is None else (fixed,):
        for size in sizes:
            sized = copy.copy(setup)  # `replace` would take a sixth of the search
            own = {"micro_batch_size": size, "gradient_accumulation_steps": sequences // size}
            vars(sized).update(own, gradient_checkpointing=checkpointing)
            plan = _plan(request, recipe, sized)
            smallest = size == sizes[0]
            if not plan.shortfalls or smallest:
                yield plan
            if plan.shortfalls:
                if smallest and checkpointing:
                    return
                break
