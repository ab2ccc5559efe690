"""What to change where nothing fits: another method, more nodes, a drive; each by itself, and tried out."""

import math
from collections.abc import Iterator
from dataclasses import replace

from recipes.planning.models import METHODS
from recipes.planning.plans import REFUSE, Found, Job
from recipes.planning.report import method_of, typed
from recipes.planning.strategies import job, search
from recipes.spec import pages
from recipes.spec.recipe import Recipe

MOST_NODES = 128


def sentence(asked: Job, found: Found) -> str:
    """Return what comes nearest to fitting, and what would fit."""
    if not found.misses:
        rows, gpus = asked.recipe.global_batch_size, asked.cluster.gpus
        fixed = [key for key in sorted(asked.fixed) if key == "deepspeed" or key.startswith("layout.")]
        if fixed:
            given = " ".join(typed(asked.recipe, fixed))
            return f"{given}: no way to train this model on {gpus} GPUs; leave out what need not be so."
        return (
            f"no layout of {gpus} GPUs is possible: global_batch_size={rows} is no multiple of the data-parallel ranks "
            f"of any; try global_batch_size={math.ceil(rows / gpus) * gpus}."
        )
    nearest = min(found.misses, key=lambda plan: plan.gpu_gib)
    ways = list(ways_out(asked))
    fits = f"What would: {'; '.join(ways)}." if ways else "Take a smaller model."
    return f"nothing fits; {nearest.recipe.deepspeed} comes nearest, with {nearest.short[0]}.\n{fits}"


def ways_out(asked: Job) -> Iterator[str]:
    """Yield each change, as it is typed for plan.py, with which the model can be trained."""
    for method in METHODS[METHODS.index(method_of(asked.recipe)) + 1 :]:
        other = by(asked.recipe, method)
        if other and search(job(other, asked.cluster)).best:
            yield f"--method {method}"
            break
    nodes = asked.cluster.nodes * 2
    while nodes <= MOST_NODES:
        if search(replace(asked, cluster=replace(asked.cluster, nodes=nodes))).best:
            yield f"--nodes {nodes}"
            break
        nodes *= 2
    if not asked.cluster.nvme_gib:
        best = search(replace(asked, cluster=replace(asked.cluster, nvme_gib=float("inf")))).best
        if best and best.nvme_gib:
            yield f"--nvme {math.ceil(best.nvme_gib / REFUSE):.0f}"


def by(recipe: Recipe, method: str) -> Recipe | None:
    """Return the recipe with another method of its page, on the same model and rows; None where the page has none."""
    family = pages.page(recipe.family)
    if method not in pages.variants(family):
        return None
    other = pages.find(f"{recipe.family}-{recipe.size}", method)
    return replace(
        other,
        model=replace(recipe.model, quantization=other.model.quantization),
        sequence_length=recipe.sequence_length,
        global_batch_size=recipe.global_batch_size,
        micro_batch_size=1,
    )
