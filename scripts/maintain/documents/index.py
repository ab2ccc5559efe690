"""The tables in recipes/README.md, and the measured peaks on each page."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import ModuleType

from deepspeed_recipes.benchmarks import results as benchmark_results
from deepspeed_recipes.benchmarks.results import MeasuredRecipe
from deepspeed_recipes.planning.cost.ranges import highest_memory
from deepspeed_recipes.planning.hardware.cluster import Cluster
from deepspeed_recipes.planning.hardware.gpus import find
from deepspeed_recipes.planning.search.plans import Plan
from deepspeed_recipes.planning.search.strategies import evaluate, plan_request, template
from deepspeed_recipes.recipe import limits, pages
from deepspeed_recipes.recipe.layout import data_parallel_size
from deepspeed_recipes.recipe.recipe import Recipe

from ..calibration import MEASUREMENTS

GPU = "H100"
"""The GPU to try with several per recipe."""
SINGLE = ("RTX 4090", "L40S", GPU, "H200")
"""GPUs to try singly, before several."""
MOST = 2048
"""The largest number of GPUs to try."""
VARIANTS = ("full", "full_offload", "lora", "qlora", "dpo_lora", "long_context")
"""The variants in the table of hardware, in columns."""
UNSHOWN = "-"


def families() -> str:
    """Return the table of families."""
    return "".join(_families())


def hardware() -> str:
    """Return the table of the hardware that each recipe needs, with an explanation of its cells."""
    return _meaning() + "".join(_needs())


def _families() -> Iterator[str]:
    """Yield the table of families, with a column for measured peaks once there are any."""
    seen = benchmark_results.measured_recipes(MEASUREMENTS)
    columns = ["family", "sizes", "variants", *(["measured per GPU"] if seen else []), "command"]
    yield _line(columns) + _line(["---"] * len(columns))
    for family in pages.families():
        module = pages.page(family)
        sizes = ", ".join(f"{size} ({pages.human(model.parameters)})" for size, model in module.SIZES.items())
        variants = pages.variants(module)
        name = f"{family}-{next(iter(module.SIZES))}"
        first = "lora" if "lora" in variants else variants[0]
        measured = [str(seen.get(f"{name}-{first}", UNSHOWN))] if seen else []
        command = f"`python scripts/launch.py {name} {first}`"
        yield _line([f"[{family}]({family}.py)", sizes, ", ".join(variants), *measured, command])


def _meaning() -> str:
    """Return what stands above the table of hardware."""
    least, *_, most = highest_memory()
    more = f"{least:.1f} to {most:.1f}"
    return f"""Predicted, not measured: the smallest hardware on which the recipe fits **as it is written**, with its
page's DeepSpeed file, micro-batch, sequence length and checkpointing. A single GPU comes first ({", ".join(SINGLE)}),
then 2, 4, 8 and more {GPU}, eight to a node; where GPUs outnumber the sequences of the batch, each gets a micro-batch.
In brackets: GiB on the fullest GPU; what published runs of its kind took at most, {more} times as much, fits too;
with offloading also GiB of host memory per node. A dash: the page has no such variant, or it does not fit on
{MOST:,} GPUs.

"""


def _needs() -> Iterator[str]:
    yield _line(["recipe", *VARIANTS]) + _line(["---"] * (1 + len(VARIANTS)))
    for family in pages.families():
        module = pages.page(family)
        for size in module.SIZES:
            known = pages.variants(module)
            cells = [_hardware(pages.build(module, size, name)) if name in known else UNSHOWN for name in VARIANTS]
            yield _line([f"{family}-{size}", *cells])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _hardware(recipe: Recipe) -> str:
    plan = smallest(recipe)
    if plan is None:
        return UNSHOWN
    host = f", host {plan.host_gib:,.0f}" if plan.setup.offload_optimizer != "none" else ""
    return f"{plan.setup.world_size} x {plan.cluster.gpu.name} ({plan.gpu_gib:.0f}{host})"


def smallest(recipe: Recipe) -> Plan | None:
    """Return the plan of a recipe, as it is written, for the smallest hardware on which it fits; None: it fits on none.

    Where the GPUs outnumber the sequences of its batch, each gets one micro-batch.
    """
    layout = recipe.layout
    for cluster in _ladder(math.lcm(layout.tensor * layout.pipeline * layout.sequence, layout.expert)):
        sequences = math.lcm(
            recipe.global_batch_size, recipe.micro_batch_size * data_parallel_size(layout, cluster.gpus)
        )
        sized = replace(recipe, global_batch_size=sequences)
        if limits.limit(sized, cluster.gpus, template(recipe.deepspeed, cluster)) is None:
            plan = evaluate(plan_request(sized, cluster), sized)
            if plan.fits:
                return plan
    return None


def _ladder(gpus: int) -> Iterator[Cluster]:
    """Yield the hardware to try for a layout of `gpus` GPUs: single ones, then that many, twice as many, ..."""
    if gpus == 1:
        yield from (Cluster(find(name)) for name in SINGLE)
        gpus = 2
    while gpus <= MOST:
        each = math.gcd(8, gpus)
        yield Cluster(find(GPU), each, gpus // each)
        gpus *= 2


COLUMN = "measured peak"


def with_measured(text: str, family: str) -> str:
    """Return a page's text with the measured peaks as the last column of its table of variants, if there are any."""
    found = benchmark_results.measured_recipes(MEASUREMENTS)
    module = pages.page(family)
    lines = text.split("\n")
    head = next(index for index, line in enumerate(lines) if line.startswith("    variant "))
    rows = range(head, lines.index("", head))
    if COLUMN in lines[head]:
        column = lines[head].index(COLUMN)
        for index in rows:
            lines[index] = lines[index][:column].rstrip()
    known = {index: _measured(module, lines[index].split()[0], found) for index in rows}
    if any(known.values()):
        width = max(len(lines[index]) for index in rows)
        for index in rows:
            cell = COLUMN if index == head else known[index] or UNSHOWN
            lines[index] = f"{lines[index]:<{width}}  {cell}"
    return "\n".join(lines)


def _measured(module: ModuleType, variant: str, found: Mapping[str, MeasuredRecipe]) -> str:
    """Return the measured peaks of a variant, by size."""
    names = {size: f"{pages.family_of(module)}-{size}-{variant}" for size in module.SIZES}
    peaks = ", ".join(f"{size} {found[name].peak_gib:.1f}" for size, name in names.items() if name in found)
    return f"{peaks} GiB" if peaks else ""
