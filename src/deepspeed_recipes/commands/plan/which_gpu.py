"""`ds-recipes plan --which-gpu`: the smallest and the cheapest hardware; `plan --gpu NAME`: the largest models."""

import argparse
import json
import shlex
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from ...planning.hardware.cluster import Cluster
from ...planning.hardware.gpus import GPUS
from ...planning.hardware.instances import prices
from ...planning.search import extremes, model_recipe, strategies
from ...planning.search.extremes import Choice
from ...planning.search.plans import Plan, Workload, in_words
from ...planning.show import table
from ...planning.show.table import hardware_in_words
from ...recipe import pages
from ...recipe.errors import UserError
from ...recipe.files import Json
from ...recipe.project import command
from . import workload
from .options import hardware_of, recipe_of

USUAL = 1e9
"""Number of tokens with which hardware is compared, if the user gives none."""
OPTIONS = ("gpu", "gpus", "gpu_memory", "host_memory", "nvme", "network", "write", "figure")
"""Options that --which-gpu excludes: it varies these itself, or they need one given hardware."""


SHOWN = 8
"""Number of choices in the table."""


def answer(arguments: argparse.Namespace, console: Console) -> int:
    """Print the smallest and the cheapest hardware, and return the exit status.

    Raises:
        UserError: an option contradicts --which-gpu, or no hardware fits or meets the deadline.
    """
    given = next((name for name in OPTIONS if getattr(arguments, name) is not None), "")
    if given or arguments.nodes != 1 or arguments.longest:
        option = given.replace("_", "-") or ("longest" if arguments.longest else "nodes")
        raise UserError(f"--which-gpu and --{option}: give one of them; --which-gpu compares all known hardware.")
    recipe, keys = recipe_of(arguments)
    work = workload.workload(arguments, recipe, keys) or Workload(USUAL, prices(arguments.price))
    if work.prices.any_node is not None:
        raise UserError(f"--price {work.prices.any_node:g}: name the instance, for example --price p5.48xlarge=55.")
    hours = workload.deadline(arguments.deadline) if arguments.deadline else None
    request = strategies.plan_request(recipe, Cluster(GPUS[-1]), keys, work.document_length)
    priced = extremes.by_price(request, work, hours)
    least = extremes.smallest_choice(request, work, hours)
    shown = _rows(priced, least)
    if not shown:
        raise UserError(_nothing(arguments, request, work, hours))
    first = shown[0]
    on_first = strategies.plan_request(recipe, first.cluster, keys, work.document_length)
    if arguments.json:
        found = table.as_json(on_first, strategies.search(on_first), work)
        print(json.dumps(found | {"which_gpu": _as_json(shown, least, work)}, indent=2))
        return 0
    console.print(f"{table.asked(on_first)}, {work.tokens:,.0f} tokens")
    console.print(_table(shown, least, work))
    console.print("\nSmallest: the fewest GPUs, and among equal numbers the least memory.")
    for note in table.cost_notes(first.plan, work):
        console.print(f"\n{note}")
    if arguments.tokens is None and not work.about:
        console.print("\nThis assumes a billion tokens; to change that, give --tokens, or data.path and epochs.")
    console.print(f"\n{_more(arguments, first)}", soft_wrap=True)
    return 0


def _more(arguments: argparse.Namespace, first: Choice) -> str:
    nodes = ["--nodes", str(first.cluster.nodes)] if first.cluster.nodes > 1 else []
    place = ["--gpu", first.cluster.instance or first.cluster.gpu.name, *nodes]
    much = ["--tokens", arguments.tokens] if arguments.tokens else []
    words = [arguments.model, *arguments.overrides, "--method", arguments.method, *place, *much]
    return f"{command('plan')} {shlex.join(words)}"


def _nothing(
    arguments: argparse.Namespace, request: strategies.PlanRequest, work: Workload, hours: float | None
) -> str:
    """Return the message that no hardware fits, or that none meets the deadline, with the fastest hardware."""
    if hours is None:
        return f"{arguments.model} does not fit on any hardware of the catalogue, up to {extremes.NODES[-1]} nodes."
    near = extremes.fastest(request, work)
    if near is None:
        return f"{arguments.model} does not fit on any hardware of the catalogue, whatever the deadline."
    return (
        f"--deadline {arguments.deadline}: no hardware meets it with up to {extremes.NODES[-1]} nodes; the fastest "
        f"with a known price is {near.cluster.nodes} x {near.cluster.instance}, {in_words(near.hours)}."
    )


def _rows(choices: Sequence[Choice], least: Choice | None) -> list[Choice]:
    """Return the choices to show: the cheapest, and the smallest if it is not among them."""
    shown = list(choices[:SHOWN])
    return shown if least is None or any(one.cluster == least.cluster for one in shown) else [*shown, least]


def _table(shown: Sequence[Choice], least: Choice | None, workload: Workload) -> Table:
    result = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "hardware", "config", "layout", "GPU full", "host GiB", "tokens/s", "$/hour", "hours", "dollars"):
        left = name in ("", "hardware", "config", "layout")
        result.add_column(name, justify="left" if left else "right", no_wrap=True)
    for choice in shown:
        plan, cluster = choice.plan, choice.cluster
        hourly = workload.per_hour(cluster)
        result.add_row(
            ", ".join(_names(choice, shown, least)),
            _in_words(cluster),
            plan.recipe.deepspeed.removesuffix(".json"),
            table.layout_in_words(plan.recipe.layout, plan.setup.data_parallel_size),
            f"{plan.share:.0%}",
            f"{plan.host_gib:,.0f}",
            f"{plan.speed * plan.setup.world_size:,.0f}",
            "-" if hourly is None else f"{hourly:,.2f}",
            *table.cost(plan, workload),
        )
    return result


def _in_words(cluster: Cluster) -> str:
    if not cluster.instance:
        return table.hardware_in_words(cluster)
    return f"{cluster.nodes} x {cluster.instance} ({cluster.gpus_per_node} x {cluster.gpu.name})"


def _names(choice: Choice, shown: Sequence[Choice], least: Choice | None) -> list[str]:
    """Return the labels of a choice: `cheapest`, `smallest`, both or none."""
    priced = [one for one in shown if one.dollars is not None]
    cheapest = ["cheapest"] if priced and choice is priced[0] else []
    return [*cheapest, *(["smallest"] if least and choice.cluster == least.cluster else [])]


def _as_json(shown: Sequence[Choice], least: Choice | None, workload: Workload) -> list[Json]:
    return [
        {
            "is": _names(choice, shown, least),
            "instance": choice.cluster.instance or None,
            "gpu": choice.cluster.gpu.name,
            "gpus_per_node": choice.cluster.gpus_per_node,
            "nodes": choice.cluster.nodes,
            "config": choice.plan.recipe.deepspeed,
            "gpu_peak_gib": choice.plan.gpu_gib,
            "host_gib": choice.plan.host_gib,
            "dollars_per_hour": workload.per_hour(choice.cluster),
            "hours": choice.hours,
            "dollars": choice.dollars,
        }
        for choice in shown
    ]


FAMILIES = ("qwen3", "llama3")
"""Dense families with many sizes."""


def what_fits(arguments: argparse.Namespace, console: Console) -> int:
    """Print the largest model that fits by method, and return the exit status: 1 if none fits.

    Raises:
        UserError: an option needs a model, or the hardware is unknown.
    """
    about_a_model = ("overrides", "tokens", "examples", "deadline", "spot", "write", "figure", "longest", "which_gpu")
    if any(getattr(arguments, name) for name in about_a_model):
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
        print(json.dumps({method: _fits_as_json(plan) for method, plan in found.items()}, indent=2))
        return 0 if found else 1
    console.print(f"The largest of {', '.join(FAMILIES)} that fit without offloading, on {hardware_in_words(hardware)}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("method", "largest", "parameters", "config", "GPU GiB", "tokens/s/GPU"):
        table.add_column(column, justify="left" if column in ("method", "largest", "config") else "right")
    for method, plan in found.items():
        size = pages.human(plan.recipe.model.parameters)
        name, file = pages.typed(plan.recipe), plan.recipe.deepspeed.removesuffix(".json")
        table.add_row(method, name, size, file, f"{plan.gpu_gib:.1f}", f"{plan.speed:,.0f}")
    console.print(table)
    if found:
        name = pages.typed(next(reversed(found.values())).recipe)
        options = (("gpu", arguments.gpu), ("gpus", arguments.gpus))
        place = "".join(f" --{option} {value}" for option, value in options if value is not None)
        console.print(
            f"\nPlans for one of them: {command('plan')} {name} {next(reversed(found))}{place}", soft_wrap=True
        )
    return 0 if found else 1


def _fits_as_json(plan: Plan) -> Json:
    return {
        "model": pages.typed(plan.recipe),
        "parameters": plan.recipe.model.parameters,
        "config": plan.recipe.deepspeed,
        "gpu_peak_gib": plan.gpu_gib,
        "tokens_per_second_per_gpu": plan.speed,
    }
