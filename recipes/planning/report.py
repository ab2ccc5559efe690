"""What a search found, as data, as a table, as a bar, and as the command that starts it."""

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from recipes.planning.hardware import Cluster
from recipes.planning.plans import Found, Job, Plan
from recipes.planning.reasons import why
from recipes.spec import pages
from recipes.spec.overrides import override_keys
from recipes.spec.recipe import Layout, Recipe

SHOWN = 8
"""Rows of the table."""
COLUMNS = ("", "config", "layout", "rows", "checkpointing", "GPU GiB", "", "host GiB", "NVMe GiB", "tokens/s/GPU")
DISK = 10
"""GiB of a checkpoint that are worth a word."""
BAR = 40
"""Characters of a GPU's whole memory."""


def as_json(job: Job, found: Found) -> dict[str, Any]:
    """Return the answer as `plan.py --json` prints it; what does not fit stands after what does."""
    cluster, recipe = job.cluster, job.recipe
    plans = [*found.plans, *found.misses]
    return {
        "model": {
            "recipe": f"{recipe.family}-{recipe.size}",
            "path": recipe.model.path,
            "model_type": job.anatomy.model_type,
            "parameters": job.anatomy.parameters,
            "method": method_of(recipe),
            "sequence_length": recipe.sequence_length,
            "global_batch_size": (plans[0].recipe if plans else recipe).global_batch_size,
        },
        "hardware": {
            "gpu": cluster.gpu.name,
            "gpu_memory_gib": cluster.gpu.memory_gib,
            "gpus_per_node": cluster.gpus_per_node,
            "nodes": cluster.nodes,
            "host_memory_gib": cluster.host_memory_gib or None,
            "nvme_gib": cluster.nvme_gib or None,
            "network_gbs": cluster.node_network_gbs if cluster.nodes > 1 else None,
            "calibrated": bool(plans) and plans[0].time.measured,
        },
        "plans": [_plan_as_json(job, plan) for plan in plans],
        "best": 0 if found.best else None,
    }


def _plan_as_json(job: Job, plan: Plan) -> dict[str, Any]:
    return {
        "config": plan.recipe.deepspeed,
        "layout": {"data": plan.setup.rows, **asdict(plan.recipe.layout)},
        "micro_batch_size": plan.setup.micro_batch_size,
        "gradient_accumulation_steps": plan.setup.accumulation,
        "gradient_checkpointing": plan.setup.gradient_checkpointing,
        "gpu_peak_gib": plan.gpu_gib,
        "gpu_breakdown_gib": dict(plan.parts),
        "host_gib": plan.host_gib,
        "nvme_gib": plan.nvme_gib,
        "checkpoint_gib": plan.checkpoint_gib,
        "tokens_per_second_per_gpu": plan.speed,
        "step_seconds": plan.time.seconds,
        "fits": plan.fits,
        "tight": plan.tight,
        "why": why(job, plan),
        "command": command(plan.recipe, job.cluster),
    }


def method_of(recipe: Recipe) -> str:
    """Return `full`, `lora` or `qlora`."""
    return "full" if recipe.lora is None else "lora" if recipe.model.quantization == "none" else "qlora"


HOSTS = "HOSTS"
"""Stands in a command for the hostfile."""


def command(recipe: Recipe, cluster: Cluster) -> str:
    """Return the command that starts a recipe on a cluster; where that has several nodes, with a hostfile `HOSTS`."""
    page = pages.find(f"{recipe.family}-{recipe.size}", recipe.variant)
    where = ["--hostfile", HOSTS, "--nodes", str(cluster.nodes)] if cluster.nodes > 1 else []
    words = [f"{recipe.family}-{recipe.size}", recipe.variant, *where, "--gpus", str(cluster.gpus_per_node)]
    return shlex.join(["python", "scripts/launch.py", *words, *changes(page, recipe)])


def changes(before: Recipe, after: Recipe) -> list[str]:
    """Return the overrides that make one recipe of another, as they are typed."""
    keys = [key for key in override_keys() if _get(after, key) != _get(before, key)]
    return typed(after, keys)


def typed(recipe: Recipe, keys: Iterable[str]) -> list[str]:
    """Return a recipe's values of some keys, as they are typed."""
    return [f"{key}={_typed(_get(recipe, key))}" for key in keys]


def _get(recipe: Recipe, key: str) -> Any:
    value: Any = recipe
    for part in key.split("."):
        value = getattr(value, part, None)
    return value


def _typed(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def show(job: Job, found: Found, console: Console, explain: bool) -> None:
    """Print the answer: the table, the best plan's memory as a bar, its reasons and its command."""
    recipe, cluster = job.recipe, job.cluster
    console.print(f"{_model(job)}, {method_of(recipe)}, rows of {recipe.sequence_length:,} tokens, on {_hardware(job)}")
    rows = [*found.plans[:SHOWN], *(found.misses if explain or not found.plans else ())]
    console.print(_table(rows))
    if found.best is None:
        return
    for line in bar(found.best):
        console.print(line)
    for number, plan in enumerate(rows if explain else rows[:1], start=1):
        console.print(f"\n{f'{number}. ' if explain else ''}{why(job, plan)}")
    for note in notes(found.best):
        console.print(f"\n{note}")
    console.print(f"\n{command(found.best.recipe, cluster)}", soft_wrap=True)


def notes(plan: Plan) -> Iterator[str]:
    """Yield what a person should know besides."""
    rows, gpus = plan.recipe.global_batch_size, plan.setup.world_size
    if plan.checkpoint_gib > DISK:
        kept = plan.recipe.keep_checkpoints
        yield f"On disk a checkpoint takes {plan.checkpoint_gib:,.0f} GiB, and keep_checkpoints={kept} of them stay."
    if not plan.time.measured:
        yield f"The speeds are computed, not measured on {plan.cluster.gpu.name}: trust their order most."
    if rows < gpus:
        yield f"{rows} rows per step are fewer than the GPUs: with global_batch_size={gpus} each could have its own."


def _model(job: Job) -> str:
    recipe = job.recipe
    known = pages.find(f"{recipe.family}-{recipe.size}", recipe.variant).model.path == recipe.model.path
    name = f"{recipe.family}-{recipe.size}" if known else recipe.model.path
    return f"{name} ({pages.human(job.anatomy.parameters)})"


def _hardware(job: Job) -> str:
    cluster = job.cluster
    one = f"{cluster.gpus_per_node} x {cluster.gpu.name} ({cluster.gpu.memory_gib:g} GiB)"
    return (
        one if cluster.nodes == 1 else f"{cluster.nodes} x {one}, {8 * cluster.node_network_gbs:,.0f} Gbit/s per node"
    )


def _table(plans: list[Plan]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("config", "layout") else "right", no_wrap=True)
    for number, plan in enumerate(plans, start=1):
        table.add_row(
            str(number),
            plan.recipe.deepspeed.removesuffix(".json"),
            written(plan.recipe.layout, plan.setup.rows),
            f"{plan.setup.micro_batch_size} x {plan.setup.accumulation}",
            "yes" if plan.setup.gradient_checkpointing else "no",
            f"{plan.gpu_gib:.1f}",
            f"{plan.share:.0%}",
            _size(plan.host_gib),
            _size(plan.nvme_gib),
            f"{plan.speed:,.0f}" if plan.fits else "does not fit",
            style=None if plan.fits and not plan.tight else "yellow" if plan.fits else "red",
        )
    return table


def _size(size: float) -> str:
    return f"{size:,.0f}" if size >= 0.5 else "-"


def written(layout: Layout, data: int) -> str:
    """Return a layout in words: `data 4 x tensor 8`."""
    sizes = {"data": data, **asdict(layout)}
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one GPU"


def bar(plan: Plan) -> Iterator[str]:
    """Yield a plan's memory on a GPU, a line per part, and what is left."""
    parts = {name.replace("_", " "): size for name, size in plan.parts.items()}
    parts = dict(sorted(parts.items(), key=lambda part: -part[1]))
    memory_gib = plan.cluster.gpu.memory_gib
    parts["free"] = memory_gib - sum(parts.values())
    yield ""
    before = 0.0
    for name, size in parts.items():
        start, stop = round(BAR * before / memory_gib), round(BAR * (before + size) / memory_gib)
        line = " " * start + ("." if name == "free" else "#") * (stop - start)
        yield f"{name:<18}{size:>8.1f} GiB  |{line:<{BAR}}|"
        before += size
