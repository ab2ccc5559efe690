"""Which parallel layouts are possible, where each rank stands in them, and what they leave for data parallelism."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from recipes.spec.errors import UserError
from recipes.spec.recipe import Layout, Recipe


@dataclass(frozen=True)
class Place:
    """Where a rank stands; every number counts from zero."""

    stage: int
    """Of the pipeline."""
    row: int
    """Which share of the global batch's rows it reads."""
    sequence: int
    """Which part of those rows it computes."""
    tensor: int
    """Which part of each matrix it holds."""

    @property
    def counts(self) -> bool:
        """Whether this is the one that counts, of all ranks that read the same rows."""
        return not (self.stage or self.sequence or self.tensor)


def place(layout: Layout, rank: int, world_size: int) -> Place:
    """Return where `rank` stands: tensor parallel ranks side by side, then sequence, rows, and stages furthest apart.

    What communicates most is nearest: tensor parallelism per layer, a pipeline once per stage. It is the order of
    DeepSpeed's own groups too: AutoTP's, and `PipeModelDataParallelTopology` with sequence ranks as its data ranks.
    """
    rank, tensor = divmod(rank, layout.tensor)
    rank, sequence = divmod(rank, layout.sequence)
    stage, row = divmod(rank, data_parallel_size(layout, world_size))
    return Place(stage, row, sequence, tensor)


def data_parallel_size(layout: Layout, world_size: int) -> int:
    """Return how many ranks read different rows. Experts are spread over those ranks, and cost none of them."""
    return world_size // (layout.tensor * layout.pipeline * layout.sequence)


def gradient_accumulation_steps(recipe: Recipe, world_size: int) -> int:
    """Return the forward passes per rank and optimizer step that make up the global batch.

    Raises:
        UserError: the global batch is not a multiple of what one pass over the world handles.
    """
    per_pass = recipe.micro_batch_size * data_parallel_size(recipe.layout, world_size)
    steps, rest = divmod(recipe.global_batch_size, per_pass)
    if rest or not steps:
        below = max(per_pass, recipe.global_batch_size // per_pass * per_pass)
        raise UserError(
            f"global_batch_size={recipe.global_batch_size} is not a multiple of micro_batch_size x data-parallel ranks "
            f"= {per_pass}; the nearest that are: {below}, {below + per_pass}."
        )
    return steps


def bubble(stages: int, micro_batches: int) -> float:
    """Return the share of a step in which a pipeline's stages wait: (d-1)/(m+d-1), as in GPipe (arXiv:1811.06965)."""
    return (stages - 1) / (micro_batches + stages - 1)


def balanced(costs: Sequence[float], count: int) -> list[range]:
    """Return `count` ranges of consecutive layers, none empty, whose dearest is as cheap as can be.

    Args:
        costs: of each layer, for instance its parameters.
        count: stages of the pipeline.

    Raises:
        UserError: there are fewer layers than stages.
    """
    if len(costs) < count:
        raise UserError(f"layout.pipeline={count}: the model has {len(costs)} layers; use at most that many stages.")
    until = [0, *accumulate(costs)]
    # By where the last stage ends: the dearest stage, the sum of squares (of equals, the evenest), and the stages.
    best: dict[int, tuple[float, float, list[range]]] = {0: (0, 0, [])}
    for stage in range(1, count + 1):
        best = {stop: _last_stage(best, until, stop) for stop in range(stage, len(costs) - (count - stage) + 1)}
    return best[len(costs)][2]


def _last_stage(
    best: dict[int, tuple[float, float, list[range]]], until: Sequence[float], stop: int
) -> tuple[float, float, list[range]]:
    """Return the best way to add a stage that ends at `stop` to the best ways to end before."""
    found = (math.inf, math.inf, [])
    for start in range(stop - 1, min(best) - 1, -1):
        cost = until[stop] - until[start]
        if cost > found[0]:
            break  # a longer stage is dearer still
        if start in best:
            dearest, squares, parts = best[start]
            option = (max(dearest, cost), squares + cost**2)
            if option <= found[:2]:
                found = (*option, [*parts, range(start, stop)])
    return found
