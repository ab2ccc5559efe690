"""The index of recipes, generated from the pages: `python -m recipes.planning.index` writes `recipes/README.md`.

It also writes into the pages what each variant is predicted to take, and what was measured.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from recipes.planning.hardware import Cluster, find
from recipes.planning.plans import TIERS, Plan
from recipes.planning.setup import setup_of
from recipes.planning.strategies import cost, job, search, template
from recipes.spec import limits, measured, pages
from recipes.spec.layout import data_parallel_size
from recipes.spec.recipe import Recipe

PATH = pages.ROOT / "recipes" / "README.md"
GPU = "H100"
"""Of the pages' predictions."""
SINGLE = ("RTX 4090", "L40S", GPU, "H200")
"""Tried before several."""
MOST = 1024
"""GPUs that are tried."""
METHODS = ("qlora", "lora", "full")

HEAD = """# Recipes

One page per model family; every size and variant is one command. This table is generated from the pages
(`python -m recipes.planning.index`); `python scripts/launch.py --list` says when to choose which variant.

    python scripts/launch.py FAMILY-SIZE VARIANT                       # fine-tune
    python scripts/launch.py FAMILY-SIZE VARIANT --draft max_steps=5   # a shrunken model: no download, no GPU
    python scripts/launch.py FAMILY-SIZE VARIANT data.path=FILE        # on your data

Every variant has been trained for three steps, resumed and exported as a draft on two CPU ranks (`make test-all`).
Measured is what `python scripts/benchmark.py` found for the command, per GPU; a dash where nobody has run it.

| family | sizes | variants | smallest hardware | measured | command |
|---|---|---|---|---|---|
"""


def main() -> None:
    """Write the index, and the pages' tables."""
    PATH.write_text(render(), encoding="utf-8")
    for family in pages.families():
        path = pages.ROOT / "recipes" / f"{family}.py"
        path.write_text(with_tables(path.read_text(encoding="utf-8"), family), encoding="utf-8")


def with_tables(text: str, family: str) -> str:
    """Return a page's text with what was measured and what is predicted; `tiny`, which runs anywhere, has neither."""
    return with_predicted(with_measured(text, family), family) if f"{COLUMN}\n" in text else text


COLUMN = "measured peak"


def with_measured(text: str, family: str) -> str:
    """Return a page's text with what was measured in the last column of its table of variants."""
    found = measured.recipes()
    module = pages.page(family)
    lines = text.split("\n")
    head = _variants(lines)
    for index in range(head + 1, _end(lines, head)):
        variant = lines[index].split()[0]
        names = {size: f"{family}-{size}-{variant}" for size in module.SIZES}
        known = ", ".join(f"{size} {found[name].peak_gib:.1f}" for size, name in names.items() if name in found)
        lines[index] = lines[index][: lines[head].index(COLUMN)] + (f"{known} GiB" if known else "-")
    return "\n".join(lines)


BEGIN = "    predicted"


def with_predicted(text: str, family: str) -> str:
    """Return a page's text with the table of predictions below its table of variants."""
    lines = text.split("\n")
    start = next((index for index, line in enumerate(lines) if line.startswith(BEGIN)), None)
    if start is None:
        start = _end(lines, _variants(lines)) + 1
        lines[start:start] = [BEGIN, ""]
    lines[start : _end(lines, start)] = predicted(family)
    return "\n".join(lines)


def _variants(lines: list[str]) -> int:
    return next(index for index, line in enumerate(lines) if line.endswith(COLUMN))


def _end(lines: list[str], start: int) -> int:
    return lines.index("", start)


def predicted(family: str) -> list[str]:
    """Return the lines of a page's predictions: a row per variant, a column per size."""
    module = pages.page(family)
    columns = [["predicted", *pages.variants(module)]]
    for size in module.SIZES:
        plans = (smallest(getattr(module, variant)(size)) for variant in pages.variants(module))
        columns.append([size, *(f"{plan.setup.world_size} x {plan.gpu_gib:.0f}" if plan else "-" for plan in plans)])
    columns.append(["GPUs x GiB: the fewest H100 80GB that it fits on", *[""] * len(pages.variants(module))])
    widths = [max(map(len, column)) for column in columns]
    lines = (zip(line, widths, strict=True) for line in zip(*columns, strict=True))
    return ["    " + "  ".join(cell.ljust(width) for cell, width in line).rstrip() for line in lines]


def smallest(recipe: Recipe) -> Plan | None:
    """Return what a recipe costs, as it is written, on the fewest GPUs that it can run on and fits; None: on none.

    Where there are more GPUs than its batch has rows, each gets one micro-batch.
    """
    layout = recipe.layout
    for cluster in _clusters(math.lcm(layout.tensor * layout.pipeline * layout.sequence, layout.expert)):
        rows = math.lcm(recipe.global_batch_size, recipe.micro_batch_size * data_parallel_size(layout, cluster.gpus))
        sized = replace(recipe, global_batch_size=rows)
        setup = setup_of(sized, template(recipe.deepspeed, cluster), cluster.gpus)
        if limits.limit(sized, cluster.gpus, limits.Sharding(setup.stage, setup.partition_size)) is None:
            plan = cost(job(sized, cluster), sized)
            if plan.fits:
                return plan
    return None


def least(recipe: Recipe) -> Plan | None:
    """Return the best plan on the smallest hardware that something fits on, with nothing offloaded; None: on none."""
    ladder = (*(Cluster(find(name)) for name in SINGLE), *_clusters(2))
    plans = (search(job(recipe, cluster)).best for cluster in ladder)
    return next((plan for plan in plans if plan and plan.recipe.deepspeed in TIERS[0]), None)


def _clusters(gpus: int) -> Iterator[Cluster]:
    """Yield clusters of so many GPUs, twice as many, and so on, up to eight to a node."""
    while gpus <= MOST:
        each = math.gcd(8, gpus)
        yield Cluster(find(GPU), each, gpus // each)
        gpus *= 2


def render() -> str:
    """Return the index as Markdown."""
    families = "".join(_row(family) for family in pages.families())
    return HEAD + families + NEEDS + "".join(_needs()) + TAIL


def _row(family: str) -> str:
    module = pages.page(family)
    sizes = ", ".join(f"{size} ({pages.human(model.parameters)})" for size, model in module.SIZES.items())
    variants = pages.variants(module)
    first = "lora" if "lora" in variants else variants[0]
    size = next(iter(module.SIZES))
    command = f"`python scripts/launch.py {family}-{size} {first}`"
    seen = measured.recipes().get(f"{family}-{size}-{first}", "-")
    needed = _hardware(pages.find(f"{family}-{size}", first))
    return f"| [{family}]({family}.py) | {sizes} | {', '.join(variants)} | {needed} | {seen} | {command} |\n"


NEEDS = """
## What it takes

The smallest hardware on which the planner finds a way, with rows as long as the recipe's, nothing offloaded to the CPU
and states in fp32; in brackets GiB on each GPU. A dash: there is no such recipe, or nothing fits. For offloading, other
GPUs and longer rows ask `python scripts/plan.py llama3-70b --method lora --gpu H100 --gpus 8`. With `deepspeed=auto`
the launcher takes the way that the planner finds.

| recipe | qlora | lora | full |
|---|---|---|---|
"""


def _needs() -> Iterator[str]:
    for family in pages.families():
        module = pages.page(family)
        for size in module.SIZES:
            known = pages.variants(module)
            cells = [_hardware(getattr(module, name)(size)) if name in known else "-" for name in METHODS]
            yield f"| {family}-{size} | {' | '.join(cells)} |\n"


def _hardware(recipe: Recipe) -> str:
    plan = least(recipe)
    return f"{plan.setup.world_size} x {plan.cluster.gpu.name} ({plan.gpu_gib:.0f})" if plan else "-"


TAIL = """
Beside the pages: [`_template.py`](_template.py), to copy for a family of your own, and
[`plain_loop.py`](plain_loop.py), the whole thing flat in one file without this project.
"""

if __name__ == "__main__":
    main()
