"""Checks the steps and ranks of `--profile` before the run starts."""

from dataclasses import replace
from pathlib import Path

from ...recipe.layout import gradient_accumulation_steps
from ...recipe.recipe import Recipe
from . import window

LAYERS = 32
"""Assumed number of layers if the model's dimensions are unknown until the ranks load it."""


def checked(recipe: Recipe, count: int, per_host: int, folder: Path) -> tuple[Recipe, str | None]:
    """Return the recipe with the steps and ranks to record, and a line that describes them, or None without --profile.

    Args:
        recipe: the recipe to run, with its model's dimensions if they are known.
        count: number of ranks.
        per_host: number of ranks on each host.
        folder: the run folder.

    Raises:
        UserError: such steps or ranks do not exist, or the disk lacks space for their traces.
    """
    asked = recipe.profile
    if asked.steps is None:
        return recipe, None
    chosen = window.ranks(asked.ranks, count, per_host)
    first, last = window.parse(asked.steps, recipe.max_steps)
    line = f"profile: {window.described(first, last)} on {window.count(len(chosen), 'rank')}"
    if not asked.nsys:
        layers = next(
            (size for name in ("num_hidden_layers", "n_layer") if (size := recipe.model.config.get(name))), LAYERS
        )
        micro_batches = gradient_accumulation_steps(recipe, count)
        line += f"; {window.room(folder, layers, micro_batches, last - first + 1, len(chosen))}"
    # `auto` is kept: if the number of steps is not known yet, the ranks choose.
    steps = asked.steps if asked.steps == window.AUTO else f"{first}:{last}"
    return replace(recipe, profile=replace(asked, steps=steps, ranks=",".join(map(str, chosen)))), line
