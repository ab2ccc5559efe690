"""`ds-recipes plan --gpu NAME` without a model: finds the largest model that fits, by method."""

import argparse
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from ...planning.search import model_recipe, strategies
from ...planning.search.plans import Plan
from ...planning.show.table import hardware_in_words
from ...recipe import pages
from ...recipe.errors import UserError
from ...recipe.project import command
from .options import hardware_of

FAMILIES = ("qwen3", "llama3")
"""Dense families with many sizes."""


def answer(arguments: argparse.Namespace, console: Console) -> int:
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
        print(json.dumps({method: _as_json(plan) for method, plan in found.items()}, indent=2))
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
        place = "" if arguments.gpu is None else f" --gpu {arguments.gpu}"
        console.print(
            f"\nPlans for one of them: {command('plan')} {name} {next(reversed(found))}{place}", soft_wrap=True
        )
    return 0 if found else 1


def _as_json(plan: Plan) -> dict[str, Any]:
    return {
        "model": pages.typed(plan.recipe),
        "parameters": plan.recipe.model.parameters,
        "config": plan.recipe.deepspeed,
        "gpu_peak_gib": plan.gpu_gib,
        "tokens_per_second_per_gpu": plan.speed,
    }
