"""The command that reproduces a run's recipe in a checkout of the project."""

import shlex

from ...recipe import overrides, pages
from ...recipe.errors import UserError
from ...recipe.recipe import Recipe
from .portable import portable_recipe


def command(recipe: Recipe, ranks: int) -> str:
    """Return the command that launches a portable recipe, without the values that its page has.

    A file outside the project is named without its folder, since only its author has it.

    Args:
        recipe: as `portable_recipe` returns it.
        ranks: of the run, per machine.
    """
    words = ["python", "scripts/launch.py", pages.typed(recipe), recipe.variant]
    words += ["--draft"] * recipe.draft.enabled
    return shlex.join([*words, "--gpus", str(ranks), *changes(recipe)])


def changes(recipe: Recipe) -> list[str]:
    """Return the overrides that turn the page's recipe into this one, or all of its keys if there is no such page."""
    page = of_page(recipe)
    if page is None:
        return overrides.as_typed(recipe, overrides.override_keys())
    found = overrides.differences(page, recipe)
    # `data.path` changes the held-out data, unless that is given too.
    settled = portable_recipe(overrides.apply(page, found))
    return [*found, *(change for change in overrides.differences(settled, recipe) if change not in found)]


def of_page(recipe: Recipe) -> Recipe | None:
    """Return the recipe as its page has it, with portable paths, or None if the project has no such page."""
    if recipe.page or recipe.family not in pages.families():
        return None
    try:
        return portable_recipe(pages.find(f"{recipe.family}-{recipe.size}", recipe.variant))
    except UserError:
        return None
