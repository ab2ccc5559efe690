"""`ds-recipes plan --which-gpu`: finds the smallest and the cheapest hardware for a recipe."""

import argparse
import json
import shlex

from rich.console import Console

from ...planning.hardware.cluster import Cluster
from ...planning.hardware.gpus import GPUS
from ...planning.search import strategies, which_gpu
from ...planning.search.run_cost import Workload, in_words
from ...planning.search.which_gpu import Choice
from ...planning.show import hardware, table
from ...recipe.errors import UserError
from ...recipe.project import command
from . import workload
from .options import recipe_of

USUAL = 1e9
"""Number of tokens with which hardware is compared, if the user gives none."""
OPTIONS = ("gpu", "gpus", "gpu_memory", "host_memory", "nvme", "network", "write", "figure")
"""Options that --which-gpu excludes: it varies these itself, or they need one given hardware."""


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
    work = workload.workload(arguments, recipe, keys) or Workload(USUAL, workload.prices(arguments.price))
    if work.prices.any_node is not None:
        raise UserError(f"--price {work.prices.any_node:g}: name the instance, for example --price p5.48xlarge=55.")
    hours = workload.deadline(arguments.deadline) if arguments.deadline else None
    request = strategies.plan_request(recipe, Cluster(GPUS[-1]), keys, work.document_length)
    priced = which_gpu.by_price(request, work, hours)
    least = which_gpu.smallest(request, work, hours)
    shown = hardware.rows(priced, least)
    if not shown:
        raise UserError(_nothing(arguments, request, work, hours))
    first = shown[0]
    on_first = strategies.plan_request(recipe, first.cluster, keys, work.document_length)
    if arguments.json:
        found = table.as_json(on_first, strategies.search(on_first), work)
        print(json.dumps(found | {"which_gpu": hardware.as_json(shown, least, work)}, indent=2))
        return 0
    console.print(f"{table.asked(on_first)}, {work.tokens:,.0f} tokens")
    console.print(hardware.table(shown, least, work))
    console.print("\nSmallest: the fewest GPUs, and among equal numbers the least memory.")
    for note in table.cost_notes(first.plan, work):
        console.print(f"\n{note}")
    if arguments.tokens is None and not work.about:
        console.print("\nThis assumes a billion tokens; to change that, give --tokens, or data.path and epochs.")
    console.print(f"\n{_more(arguments, first)}", soft_wrap=True)
    return 0


def _more(arguments: argparse.Namespace, first: Choice) -> str:
    """Return the command that shows all plans on the first choice."""
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
        return f"{arguments.model} does not fit on any hardware of the catalogue, up to {which_gpu.NODES[-1]} nodes."
    near = which_gpu.fastest(request, work)
    if near is None:
        return f"{arguments.model} does not fit on any hardware of the catalogue, whatever the deadline."
    return (
        f"--deadline {arguments.deadline}: no hardware meets it with up to {which_gpu.NODES[-1]} nodes; the fastest "
        f"with a known price is {near.cluster.nodes} x {near.cluster.instance}, {in_words(near.hours)}."
    )
