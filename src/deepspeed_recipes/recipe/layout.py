"""A rank's position in a parallel layout, the data-parallel size that a layout leaves, and the stages of a pipeline."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from .compatibility import refusal
from .errors import UserError
from .methods import Grpo
from .recipe import Layout, Recipe


@dataclass(frozen=True)
class RankPosition:
    """A rank's position along each dimension of a layout, counted from zero."""

    stage: int
    """Pipeline stage."""
    data: int
    """Data-parallel rank: the share of the global batch that the rank reads."""
    sequence: int
    """The part of these sequences that the rank computes."""
    tensor: int
    """The part of each split matrix that the rank holds."""

    @property
    def is_first_reader(self) -> bool:
        """True for the first of the ranks that read the same sequences; only this rank's tokens are counted."""
        return not (self.stage or self.sequence or self.tensor)


def rank_position(layout: Layout, rank: int, world_size: int) -> RankPosition:
    """Return the position of `rank`: tensor ranks are adjacent, then sequence, then data; stages are furthest apart.

    Ranks that communicate most are closest together: tensor parallelism communicates in every layer, a pipeline once
    per stage. DeepSpeed orders its own groups the same way: AutoTP's, and `PipeModelDataParallelTopology` with the
    sequence ranks among its data ranks.
    """
    rank, tensor = divmod(rank, layout.tensor)
    rank, sequence = divmod(rank, layout.sequence)
    stage, data = divmod(rank, data_parallel_size(layout, world_size))
    return RankPosition(stage, data, sequence, tensor)


def data_parallel_size(layout: Layout, world_size: int) -> int:
    """Return the number of ranks that read different sequences. Experts are spread over these ranks."""
    return world_size // (layout.tensor * layout.pipeline * layout.sequence)


def gradient_accumulation_steps(recipe: Recipe, world_size: int) -> int:
    """Return the number of forward passes per rank and optimizer step that make up the global batch exactly."""
    per_pass = recipe.micro_batch_size * data_parallel_size(recipe.layout, world_size)
    steps, rest = divmod(recipe.global_batch_size, per_pass)
    if rest or not steps:
        unit = batch_unit(recipe, per_pass)
        below = max(unit, recipe.global_batch_size // unit * unit)
        raise UserError(
            f"global_batch_size={recipe.global_batch_size} is not a multiple of {per_pass} (micro_batch_size x "
            f"data-parallel size); the nearest multiples are: {below}, {below + unit}."
        )
    return steps


def batch_unit(recipe: Recipe, per_pass: int) -> int:
    """Return the number that a global batch is a multiple of if a pass of all ranks reads `per_pass` sequences."""
    # GRPO needs whole groups of answers.
    return math.lcm(per_pass, recipe.method.group_size) if isinstance(recipe.method, Grpo) else per_pass


def bubble(stages: int, micro_batches: int) -> float:
    """Return the share of a step that pipeline stages spend idle: (d-1)/(m+d-1), as in GPipe (arXiv:1811.06965)."""
    return (stages - 1) / (micro_batches + stages - 1)


def balanced(costs: Sequence[float], count: int) -> list[range]:
    """Return `count` non-empty ranges of consecutive layers whose most expensive range is as cheap as possible."""
    if len(costs) < count:
        raise refusal("too few layers", size=count, layers=len(costs))
    until = [0, *accumulate(costs)]
    # By the end of the last stage: the highest cost, the sum of squares (which breaks ties evenly), the stages.
    best: dict[int, tuple[float, float, list[range]]] = {0: (0, 0, [])}
    for stage in range(1, count + 1):
        before, best = best, {}
        for stop in range(stage, len(costs) - (count - stage) + 1):
            best[stop] = (math.inf, math.inf, [])
            for start in range(stop - 1, min(before) - 1, -1):
                cost = until[stop] - until[start]
                if cost > best[stop][0]:
                    break  # a longer stage costs even more
                if start not in before:
                    continue
                highest, squares, stages = before[start]
                option = (max(highest, cost), squares + cost**2)
                if option <= best[stop][:2]:
                    best[stop] = (*option, [*stages, range(start, stop)])
    return best[len(costs)][2]


def per_layer(config: Mapping[str, object], layers: int) -> list[str]:
    """Return the keys of a model's configuration whose lists have an entry for each of its layers.

    Falcon-H1 has lists of two and of five numbers, which belong to no layer, however many layers there are.
    """
    return [
        name
        for name, value in config.items()
        if isinstance(value, list | tuple)
        and len(value) == layers > 0
        and name != "architectures"
        and ("layer" in name or "pattern" in name or not isinstance(value[0], float))
    ]


DRAFT_HEADS = 4
"""Attention heads of a draft; as many query heads share a key/value head as in the original."""
DRAFT_EXPERTS = 4
"""Experts per layer of a draft's MoE model."""


def draft_key_value_heads(heads: int, shared: int) -> int:
    """Return a draft's number of key/value heads: the original's ratio to its `heads`, but two if it has two or more.

    With a single one, a draft could not be trained with tensor parallelism.
    """
    return min(shared, max(2, DRAFT_HEADS * shared // heads))
