"""The search: every way to train a model on a cluster that is possible and fits, the best first.

A way is a file in `configs/`, a layout, a micro-batch and whether to checkpoint. What cannot run is left out by the
launcher's own rules (`spec.limits`), what does not fit by `memory`, and the rest is ranked by `time`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from recipes.planning.hardware import Cluster
from recipes.planning.memory import peak
from recipes.planning.plans import SIMPLICITY, TIERS, Found, Job, Plan, judge, ranked
from recipes.planning.setup import Setup, setup_of
from recipes.planning.time import step
from recipes.planning.trace import anatomy
from recipes.spec import limits
from recipes.spec.errors import UserError
from recipes.spec.layout import data_parallel_size
from recipes.spec.pages import ROOT
from recipes.spec.recipe import Layout, Recipe
from recipes.spec.run_folder import read_json

MOST_ROWS = 64
"""Per forward pass; more does not make a GPU faster."""
MOST_STAGES = 64


def job(recipe: Recipe, cluster: Cluster, fixed: Iterable[str] = ()) -> Job:
    """Return what a plan is wanted for, the recipe's model taken apart.

    Raises:
        UserError: not a decoder that transformers knows, or not one for such adapters.
    """
    return Job(recipe, anatomy(recipe.model.config, recipe.lora), cluster, frozenset(fixed))


def search(job: Job) -> Found:
    """Return what fits, or what would come nearest to it."""
    job = replace(job, recipe=_dividing(job))
    found: list[Plan] = []
    misses: dict[str, Plan] = {}
    for tier in ((job.recipe.deepspeed,),) if "deepspeed" in job.fixed else TIERS:
        for name, recipes in _ways(job, tier):
            for recipe in recipes:
                ways = list(_sized(job, recipe))
                fitting = [plan for plan in ways if plan.fits]
                if fitting:
                    found.append(ranked(fitting)[0])
                    break  # longer parts of a row fit: it is split over no more ranks than it has to be
                for plan in ways:
                    if name not in misses or plan.gpu_gib < misses[name].gpu_gib:
                        misses[name] = plan
        if found:
            break
    used = {plan.recipe.deepspeed for plan in found}
    return Found(tuple(ranked(found)), tuple(plan for name, plan in misses.items() if name not in used))


def cost(job: Job, recipe: Recipe) -> Plan:
    """Return what one given way to train costs; `recipe.deepspeed` may be a path."""
    config = template(recipe.deepspeed, job.cluster)
    return _plan(job, recipe, config, setup_of(recipe, config, job.cluster.gpus))


def template(deepspeed: str, cluster: Cluster) -> Mapping[str, Any]:
    """Return a DeepSpeed file by its name in `configs/` or its path, hpZ's groups as large as the cluster's nodes."""
    config = _read(deepspeed)
    if deepspeed != "zero3_hpz.json":
        return config
    zero = config["zero_optimization"] | {"zero_hpz_partition_size": cluster.gpus_per_node}
    return config | {"zero_optimization": zero}


@cache
def _read(deepspeed: str) -> dict[str, Any]:
    shipped = ROOT / "configs"
    for path in (shipped / deepspeed, Path(deepspeed)):
        if path.is_file():
            return read_json(path)
    known = [path.name for path in shipped.glob("*.json")]
    near = get_close_matches(deepspeed, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"in configs/ there are {', '.join(sorted(known))}."
    raise UserError(f"deepspeed={deepspeed}: no such file; {hint}")


def _dividing(job: Job) -> Recipe:
    """Return the recipe, its global batch raised to the next that all ranks can share out."""
    recipe, gpus = job.recipe, job.cluster.gpus
    if "global_batch_size" in job.fixed or gpus > recipe.global_batch_size:
        return recipe
    micro = recipe.micro_batch_size if "micro_batch_size" in job.fixed else 1
    rows = math.ceil(recipe.global_batch_size / (gpus * micro)) * gpus * micro
    return replace(recipe, global_batch_size=rows, micro_batch_size=micro)


def _ways(job: Job, files: Sequence[str]) -> Iterator[tuple[str, Iterator[Recipe]]]:
    """Yield every file with the possible layouts that differ in sequence parallelism only, the smallest first."""
    for layouts in _layouts(job):
        for name in files:
            yield name, _possible(job, name, layouts)


def _possible(job: Job, name: str, layouts: Sequence[Layout]) -> Iterator[Recipe]:
    """Yield the recipe in those of some layouts in which it can run, with one row per pass."""
    world = job.cluster.gpus
    for layout in layouts:
        recipe = replace(job.recipe, deepspeed=name, layout=layout, micro_batch_size=1)
        data = data_parallel_size(layout, world)
        if not data or recipe.global_batch_size % data or not _suits(name, layout, job):
            continue
        setup = setup_of(recipe, template(name, job.cluster), world)
        if limits.limit(recipe, world, limits.Sharding(setup.stage, setup.partition_size)) is None:
            yield recipe


def _layouts(job: Job) -> Iterator[list[Layout]]:
    """Yield every layout that may be sensible: tensor parallelism stays inside a node, where links are fast."""

    def sizes(name: str, most: int) -> list[int]:
        if f"layout.{name}" in job.fixed:
            return [getattr(job.recipe.layout, name)]
        return limits.divisors(most)

    world = job.cluster.gpus
    for tensor in sizes("tensor", job.cluster.gpus_per_node):
        for pipeline in sizes("pipeline", world // tensor):
            if pipeline <= MOST_STAGES:
                lengths = sizes("sequence", world // tensor // pipeline)
                yield [
                    Layout(tensor, pipeline, length) for length in lengths if world % (tensor * pipeline * length) == 0
                ]
    if any(kind.routed for kind in job.anatomy.kinds):
        for expert in sizes("expert", world):
            yield [Layout(expert=expert)] if expert > 1 else []


def _suits(name: str, layout: Layout, job: Job) -> bool:
    """Return whether a file is the one to take for a layout and a method."""
    if "deepspeed" in job.fixed:
        config = _read(name)
        split = ("tensor_parallel" in config) <= (layout.tensor > 1)
        split &= name != "pipeline.json" or layout.pipeline > 1
        return split and ("expert_parallel" in config) == (layout.expert > 1)
    adapters = job.recipe.lora is not None
    mixture = any(kind.routed for kind in job.anatomy.kinds)
    if job.recipe.model.quantization != "none" and "zero3" in name:
        return False  # transformers loads 4-bit weights whole on every rank: there is nothing to shard
    if layout.pipeline > 1 or layout.expert > 1:
        return name == ("pipeline.json" if layout.pipeline > 1 else "expert_parallel.json")
    whole = "zero3_moe.json" if mixture else "zero3_adapters.json" if adapters else "zero3.json"
    if layout.tensor > 1:
        return name in ("tensor_parallel.json", "zero2.json", whole)
    if layout.sequence > 1:
        long = "sequence_parallel.json" if whole == "zero3.json" else whole
        return name in ("zero1.json", "zero2.json", long, *SIMPLICITY[len(TIERS[0]) :])
    if name == "zero3_hpz.json":
        return job.cluster.nodes > 1 and job.cluster.gpus_per_node > 1
    return name in ("zero0.json", "zero1.json", "zero2.json", whole, *SIMPLICITY[len(TIERS[0]) :])


def _sized(job: Job, recipe: Recipe) -> Iterator[Plan]:
    """Yield a way with every micro-batch that fits, without and with checkpointing; or the least that does not.

    Memory grows with the micro-batch, and checkpointing never adds to it: what does not fit ends the row.
    """
    config = template(recipe.deepspeed, job.cluster)
    setup = setup_of(recipe, config, job.cluster.gpus)
    rows = recipe.global_batch_size // setup.rows
    fixed = recipe.gradient_checkpointing if "gradient_checkpointing" in job.fixed else None
    for checkpointing in (True, False) if fixed is None else (fixed,):
        for micro in _micro_batches(job, rows):
            sized = replace(recipe, micro_batch_size=micro, gradient_checkpointing=checkpointing)
            plan = _plan(
                job,
                sized,
                config,
                replace(
                    setup,
                    micro_batch_size=micro,
                    accumulation=rows // micro,
                    gradient_checkpointing=checkpointing,
                ),
            )
            if plan.fits or micro == 1:
                yield plan
            if not plan.fits:
                if micro == 1 and checkpointing:
                    return
                break


def _micro_batches(job: Job, rows: int) -> list[int]:
    if "micro_batch_size" in job.fixed:
        return [job.recipe.micro_batch_size] if rows % job.recipe.micro_batch_size == 0 else []
    return [size for size in range(1, min(rows, MOST_ROWS) + 1) if rows % size == 0]


def _plan(job: Job, recipe: Recipe, config: Mapping[str, Any], setup: Setup) -> Plan:
    memory = peak(job.anatomy, setup, job.cluster)
    short, tight = judge(memory, job.cluster)
    time = step(job.anatomy, setup, job.cluster)
    return Plan(recipe, config, setup, job.cluster, memory, time, short, tight)
