"""Which parallel layouts are possible, and what they leave for data parallelism."""

import math

from recipes.spec.errors import UserError
from recipes.spec.recipe import Layout, Recipe


def data_parallel_size(layout: Layout, world_size: int) -> int:
    """Return how many ranks read different rows. Experts are spread over those ranks, and cost none of them.

    Raises:
        UserError: the layout does not divide the world, or asks for a kind of parallelism that no engine
            of this version runs.
    """
    for kind in ("tensor", "pipeline", "sequence"):
        size = getattr(layout, kind)
        if size > 1:
            raise UserError(f"layout.{kind}={size}: this version runs data and expert parallelism only; use 1.")
    if world_size % layout.expert:
        raise UserError(
            f"layout.expert={layout.expert}: {world_size} ranks are not a multiple of it; "
            f"use layout.expert={math.gcd(world_size, layout.expert)}."
        )
    return world_size


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
