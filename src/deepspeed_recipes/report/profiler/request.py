"""What `--profile` asks for, checked before the run starts."""

from dataclasses import replace
from pathlib import Path

from ...recipe.layout import gradient_accumulation_steps
from ...recipe.recipe import Recipe
from . import window

LAYERS = 32
"""Of a model whose dimensions only the ranks will know."""


def checked(recipe: Recipe, count: int, per_host: int, folder: Path) -> tuple[Recipe, str | None]:
    """Return the recipe with the steps and the ranks that are recorded, and a line on that; None: nothing is recorded.

    Args:
        recipe: as it will run, with its model's dimensions where they are known.
        count: of the run's ranks.
        per_host: ranks on each host.
        folder: the run's.

    Raises:
        UserError: no such steps or ranks, or no room for their traces.
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
    # `auto` stays: where the number of steps is not known yet, the ranks decide.
    steps = asked.steps if asked.steps == window.AUTO else f"{first}:{last}"
    return replace(recipe, profile=replace(asked, steps=steps, ranks=",".join(map(str, chosen)))), line
