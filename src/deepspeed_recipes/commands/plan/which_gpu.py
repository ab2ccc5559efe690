"""`ds-recipes plan --which-gpu`: the smallest and the cheapest hardware; `plan --gpu NAME`: the largest models."""

import argparse
import json
import shlex
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from ...planning import table
from ...planning.hardware.cluster import Cluster
from ...planning.hardware.gpus import GPUS
from ...planning.hardware.instances import prices
from ...planning.search import extremes, model_recipe, strategies
from ...planning.search.plans import Plan, Workload, in_words
from ...planning.table import hardware_in_words
from ...recipe import pages
from ...recipe.errors import UserError
from ...recipe.files import Json
from ...recipe.project import command
from . import serving, workload
from .options import hardware_of, recipe_of

USUAL = 1e9
"""Number of tokens with which hardware is compared, if the user gives none."""
OPTIONS = (
    *("gpu", "gpus", "gpu_memory", "host_memory", "nvme", "network", "machine"),
    *("write", "longest", "explain", "serve", "software"),
)
"""Options that --which-gpu excludes: it varies these itself, or they need one given hardware."""
SHOWN = 8
"""Number of choices in the table."""


def answer(arguments: argparse.Namespace, console: Console) -> int:
    """Print the smallest and the cheapest hardware, and return the exit status."""
    given = next((name for name in OPTIONS if getattr(arguments, name) not in (None, False, [])), "")
    if given or arguments.nodes != 1:
        option = f"{given}=..." if given == "software" else f"--{given.replace('_', '-') or 'nodes'}"
        raise UserError(f"--which-gpu and {option}: give one of them; --which-gpu compares all known hardware.")
    recipe, keys = recipe_of(arguments)
    work = workload.workload(arguments, recipe, keys) or Workload(USUAL, prices=prices(arguments.price))
    if (price := work.prices.given.get("")) is not None:
        raise UserError(f"--price {price:g}: name the instance, for example --price p5.48xlarge=55.")
    hours = workload.deadline(arguments.deadline) if arguments.deadline else None
    request = strategies.plan_request(recipe, Cluster(GPUS[-1]), keys, work.document_length)
    priced = extremes.by_price(request, work, hours)
    least = extremes.smallest_hardware(request, work, hours)
    shown = priced[:SHOWN]
    if least and all(plan.cluster != least.cluster for plan in shown):
        shown.append(least)
    if not shown:
        wanted = f"finishes within {in_words(hours)}" if hours else "fits"
        raise UserError(
            f"{arguments.model}: nothing in the catalogue {wanted}, with up to {extremes.NODES[-1]} nodes; "
            "--gpu NAME --gpus N --nodes M shows how far it is."
        )
    first = shown[0]
    on_first = strategies.plan_request(recipe, first.cluster, keys, work.document_length)
    if arguments.json:
        found = table.as_json(strategies.search(on_first), work)
        print(json.dumps(found | {"which_gpu": _as_json(shown, least, work)}, indent=2))
        return 0
    console.print(f"{table.asked(on_first)}, {work.tokens:,.0f} tokens")
    console.print(_table(shown, least, work))
    console.print("\nSmallest: the fewest GPUs, and among equal numbers the least memory.")
    for note in table.cost_notes(first, work):
        console.print(f"\n{note}")
    if arguments.tokens is None and not work.about:
        console.print("\nThis assumes a billion tokens; to change that, give --tokens, or data.path and epochs.")
    nodes = ["--nodes", str(first.cluster.nodes)] if first.cluster.nodes > 1 else []
    place = ["--gpu", first.cluster.instance or first.cluster.gpu.name, *nodes]
    much = ["--tokens", arguments.tokens] if arguments.tokens else []
    words = [arguments.model, *arguments.overrides, "--method", arguments.method, *place, *much]
    console.print(f"\n{command('plan')} {shlex.join(words)}", soft_wrap=True)
    return 0


def _table(shown: Sequence[Plan], least: Plan | None, workload: Workload) -> Table:
    rows = []
    for plan in shown:
        cluster = plan.cluster
        machines = f"{cluster.nodes} x {cluster.instance} ({cluster.gpus_per_node} x {cluster.gpu.name})"
        hourly = workload.per_hour(plan.cluster)
        hours, dollars = table.cost(plan, workload)
        row = {
            "": ", ".join(_names(plan, shown, least, workload)),
            "hardware": machines if cluster.instance else hardware_in_words(cluster),
            "config": plan.recipe.deepspeed.removesuffix(".json"),
            "layout": table.layout_in_words(plan.recipe.layout, plan.setup.data_parallel_size),
            "GPU full": f"{plan.share:.0%}",
            "host GiB": f"{plan.memory.host_gib:,.0f}",
            "tokens/s": f"{plan.speed * plan.setup.world_size:,.0f}",
            "$/hour": "-" if hourly is None else f"{hourly:,.2f}",
        }
        rows.append(row | {"hours": hours, "dollars": dollars})
    return table.columns(rows, ("", "hardware", "config", "layout"))


def _names(plan: Plan, shown: Sequence[Plan], least: Plan | None, workload: Workload) -> list[str]:
    """Return the labels of a row: `cheapest`, `smallest`, both or none."""
    priced = [one for one in shown if workload.dollars(one) is not None]
    cheapest = ["cheapest"] if priced and plan is priced[0] else []
    return [*cheapest, *(["smallest"] if least and plan.cluster == least.cluster else [])]


def _as_json(shown: Sequence[Plan], least: Plan | None, workload: Workload) -> list[Json]:
    return [
        {
            "is": _names(plan, shown, least, workload),
            "instance": plan.cluster.instance or None,
            "gpu": plan.cluster.gpu.name,
            "gpus_per_node": plan.cluster.gpus_per_node,
            "nodes": plan.cluster.nodes,
            "config": plan.recipe.deepspeed,
            "gpu_peak_gib": plan.gpu_gib,
            "host_gib": plan.memory.host_gib,
            "dollars_per_hour": workload.per_hour(plan.cluster),
            "hours": workload.hours(plan),
            "dollars": workload.dollars(plan),
        }
        for plan in shown
    ]


FAMILIES = ("qwen3", "llama3")
"""Dense families with many sizes."""


def what_fits(arguments: argparse.Namespace, console: Console) -> int:
    """Print the largest model that fits by method, and return the exit status: 1 if none fits."""
    others = (*serving.OPTIONS, "overrides", "sequence_length", "software", "serve")
    if arguments.method != "full" or any(getattr(arguments, name) for name in others):
        raise UserError("name a model first, for example llama3-8b; without one, --gpu NAME lists what fits.")
    hardware = hardware_of(arguments)
    models = [
        (model.parameters, f"{family}-{size}")
        for family in FAMILIES
        for size, model in pages.page(family).SIZES.items()
    ]
    names = [name for _, name in sorted(models, reverse=True)]
    found: dict[str, Plan] = {}
    for method in model_recipe.METHODS:
        for name in names:
            recipe = model_recipe.find(name, method)
            request = strategies.plan_request(recipe, hardware, model_recipe.pinned(recipe))
            if (best := strategies.search(request).best) and not best.tier:
                found[method] = best
                break
    if arguments.json:
        by_method = {
            method: {
                "model": pages.typed(plan.recipe),
                "parameters": plan.recipe.model.parameters,
                "config": plan.recipe.deepspeed,
                "gpu_peak_gib": plan.gpu_gib,
                "tokens_per_second_per_gpu": plan.speed,
            }
            for method, plan in found.items()
        }
        print(json.dumps(by_method, indent=2))
        return 0 if found else 1
    console.print(f"The largest of {', '.join(FAMILIES)} that fit without offloading, on {hardware_in_words(hardware)}")
    rows = [
        {
            "method": method,
            "largest": pages.typed(plan.recipe),
            "parameters": pages.human(plan.recipe.model.parameters),
            "config": plan.recipe.deepspeed.removesuffix(".json"),
            "GPU GiB": f"{plan.gpu_gib:.1f}",
            "tokens/s/GPU": f"{plan.speed:,.0f}",
        }
        for method, plan in found.items()
    ]
    console.print(table.columns(rows, ("method", "largest", "config")))
    if found:
        name = pages.typed(next(reversed(found.values())).recipe)
        options = (("gpu", arguments.gpu), ("gpus", arguments.gpus))
        place = "".join(f" --{option} {value}" for option, value in options if value is not None)
        console.print(
            f"\nPlans for one of them: {command('plan')} {name} {next(reversed(found))}{place}", soft_wrap=True
        )
    return 0 if found else 1
