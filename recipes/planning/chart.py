"""The decision chart in configs/README.md, the planner's own answers: `python -m recipes.planning.chart` writes it."""

from dataclasses import replace

from recipes.planning import models
from recipes.planning.hardware import Cluster, find
from recipes.planning.plans import Plan
from recipes.planning.strategies import job, search
from recipes.spec import pages
from recipes.spec.marks import between
from recipes.spec.recipe import Layout

PATH = pages.ROOT / "configs" / "README.md"
BEGIN, END = "<!-- chart -->\n", "<!-- /chart -->\n"

MODELS = {
    "1B": "llama3-1b",
    "8B": "llama3-8b",
    "32B": "qwen3-32b",
    "70B": "llama3-70b",
    "176B": "bloom-176b",
}
GPUS = (1, 8, 64)
GPU = "H100"
HOST_GIB, NVME_GIB = 200, 3000
"""Per GPU."""
ROW, ROWS = 2048, 64
"""Tokens of a row, and rows of a step."""


def main() -> None:
    """Write the chart."""
    PATH.write_text(written_into(PATH.read_text(encoding="utf-8")), encoding="utf-8")


def written_into(page: str) -> str:
    """Return the page with the chart in its place, between the two marks."""
    return between(page, BEGIN, END, render())


def render() -> str:
    """Return the chart as Markdown."""
    lines = [f"| model | method | {' | '.join(f'{gpus} GPU' + 's' * (gpus > 1) for gpus in GPUS)} |"]
    lines.append("|---" * (2 + len(GPUS)) + "|")
    for name, recipe in MODELS.items():
        for method in models.METHODS:
            cells = [cell(best(recipe, method, gpus)) for gpus in GPUS]
            lines.append(f"| {name} | {method} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def best(recipe: str, method: str, gpus: int) -> Plan | None:
    """Return the planner's choice for a recipe on so many GPUs, 8 to a node; None where nothing fits."""
    found = models.find(recipe, method)
    nodes = max(1, gpus // 8)
    each = gpus // nodes
    cluster = Cluster(find(GPU), each, nodes, HOST_GIB * each, NVME_GIB * each)
    asked = replace(found, sequence_length=ROW, global_batch_size=ROWS)
    return search(job(asked, cluster)).best


def cell(plan: Plan | None) -> str:
    """Return a plan as the chart has it: file, layout, rows per pass, checkpointing, and memory per GPU."""
    if plan is None:
        return "-"
    recipe = plan.recipe
    sizes = {name: getattr(recipe.layout, name) for name in vars(Layout())}
    words = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    words.append("checkpointing" if recipe.gradient_checkpointing else f"rows {recipe.micro_batch_size}")
    return f"`{recipe.deepspeed.removesuffix('.json')}`, {', '.join(words)}: {plan.gpu_gib:.0f} GiB"


if __name__ == "__main__":
    main()
