"""The decision chart in configs/README.md: the planner's choices by model, method and number of GPUs."""

from dataclasses import replace

from deepspeed_recipes.planning.hardware.cluster import Cluster
from deepspeed_recipes.planning.hardware.gpus import find
from deepspeed_recipes.planning.search import model_recipe
from deepspeed_recipes.planning.search.plans import Plan
from deepspeed_recipes.planning.search.strategies import plan_request, search
from deepspeed_recipes.recipe.recipe import Layout

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
"""Host memory and NVMe per GPU."""
SEQUENCE_LENGTH, BATCH = 2048, 64
"""Sequence length in tokens, and sequences per step."""


def render() -> str:
    """Return the chart as Markdown."""
    lines = [f"| model | method | {' | '.join(f'{gpus} GPU' + 's' * (gpus > 1) for gpus in GPUS)} |"]
    lines.append("|---" * (2 + len(GPUS)) + "|")
    for name, recipe in MODELS.items():
        for method in model_recipe.METHODS:
            cells = [cell(best(recipe, method, gpus)) for gpus in GPUS]
            lines.append(f"| {name} | {method} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def best(recipe: str, method: str, gpus: int) -> Plan | None:
    """Return the planner's choice for a recipe on `gpus` GPUs, 8 per node, or None if nothing fits."""
    found = model_recipe.find(recipe, method)
    nodes = max(1, gpus // 8)
    each = gpus // nodes
    cluster = Cluster(find(GPU), each, nodes, HOST_GIB * each, NVME_GIB * each)
    sized = replace(found, sequence_length=SEQUENCE_LENGTH, global_batch_size=BATCH)
    return search(plan_request(sized, cluster)).best


def cell(plan: Plan | None) -> str:
    """Return a plan as a cell of the chart: file, layout, micro-batch size or checkpointing, and memory per GPU."""
    if plan is None:
        return "-"
    recipe = plan.recipe
    sizes = {name: getattr(recipe.layout, name) for name in vars(Layout())}
    words = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    words.append("checkpointing" if recipe.gradient_checkpointing else f"micro-batch {recipe.micro_batch_size}")
    return f"`{recipe.deepspeed.removesuffix('.json')}`, {', '.join(words)}: {plan.gpu_gib:.0f} GiB"
