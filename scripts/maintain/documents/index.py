"""The table of families in recipes/README.md; those of hardware and of other tools' names in scripts/README.md."""

import json
from itertools import product

from deepspeed_recipes.planning.cost.constants import FILE
from deepspeed_recipes.planning.search.extremes import GPU, LARGEST, SINGLE, smallest_unchanged
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.overrides import FOREIGN_NAMES, OTHER_TOOLS, SAME
from deepspeed_recipes.recipe.recipe import Recipe

from .. import gpu_results
from ..calibration import MEASUREMENTS

VARIANTS = ("full", "full_offload", "lora", "qlora", "dpo_lora", "long_context")
"""The variants in the table of hardware, in columns."""
UNSHOWN = "-"


def families() -> str:
    """Return the table of families, with a column for measured peaks once there are any."""
    seen = gpu_results.measured_recipes(MEASUREMENTS)
    columns = ["family", "sizes", "variants", *(["measured per GPU"] if seen else []), "command"]
    lines = [_line(columns), _line(["---"] * len(columns))]
    for family in pages.families():
        module = pages.page(family)
        sizes = ", ".join(f"{size} ({pages.human(model.parameters)})" for size, model in module.SIZES.items())
        variants = pages.variants(module)
        name = f"{family}-{next(iter(module.SIZES))}"
        first = "lora" if "lora" in variants else variants[0]
        found = (
            f"{size} {one}: {seen[key]}"
            for size, one in product(module.SIZES, variants)
            if (key := f"{family}-{size}-{one}") in seen
        )
        measured = ["; ".join(found) or UNSHOWN] if seen else []
        command = f"`python scripts/launch.py {name} {first}`"
        lines.append(_line([f"[{family}]({family}.py)", sizes, ", ".join(variants), *measured, command]))
    return "".join(lines)


def hardware() -> str:
    """Return the table of the hardware that each recipe needs, with an explanation of its cells."""
    least, *_, most = sorted(high for _, high, _ in json.loads(FILE.read_text())["ranges"]["memory"].values())
    more = f"{least:.1f} to {most:.1f}"
    meaning = f"""Predicted, not measured: the smallest hardware on which the recipe fits **unchanged**, with its page's
DeepSpeed file, micro-batch, sequence length and checkpointing. Single GPUs are tried first ({", ".join(SINGLE)}), then
2, 4, 8 and more {GPU}, eight per node; if there are more GPUs than sequences in the batch, each GPU gets a micro-batch.
In brackets: GiB on the fullest GPU, and with offloading also GiB of host memory per node. The memory leaves room for
{more} times as much, the most that published runs of the same kind took. A dash: the page has no such variant, or it
does not fit on {LARGEST:,} GPUs.

"""
    lines = [_line(["recipe", *VARIANTS]), _line(["---"] * (1 + len(VARIANTS)))]
    for family in pages.families():
        module = pages.page(family)
        known = pages.variants(module)
        for size in module.SIZES:
            cells = [_hardware(pages.build(module, size, name)) if name in known else UNSHOWN for name in VARIANTS]
            lines.append(_line([f"{family}-{size}", *cells]))
    return meaning + "".join(lines)


def names() -> str:
    """Return the table of the names in other tools, by ours."""
    names: dict[str, list[str]] = {}
    for theirs, ours in (FOREIGN_NAMES | OTHER_TOOLS["options"]).items():
        names.setdefault(ours, []).append(theirs)
    meanings = {ours: f": {meaning}" for ours, meaning in OTHER_TOOLS["meanings"].items()}
    rows = (
        _line(
            [
                f"`{ours}`{meanings.get(ours, '')}",
                ", ".join(f"**`{name}`**" if name in SAME else f"`{name}`" for name in theirs),
            ]
        )
        for ours, theirs in names.items()
    )
    return _line(["here", "elsewhere"]) + _line(["---", "---"]) + "".join(rows)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _hardware(recipe: Recipe) -> str:
    plan = smallest_unchanged(recipe)
    if plan is None:
        return UNSHOWN
    host = f", host {plan.memory.host_gib:,.0f}" if plan.setup.offload_optimizer != "none" else ""
    return f"{plan.setup.world_size} x {plan.cluster.gpu.name} ({plan.gpu_gib:.0f}{host})"
