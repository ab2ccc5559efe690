"""The licence of a base model: as stated by its page, and in the Hub's terms."""

from pathlib import PurePath

from ...recipe import pages
from ...recipe.recipe import Recipe
from .portable import portable_path

_HUB_NAMES = {
    "apache-2.0": "apache-2.0",
    "mit": "mit",
    "gemma": "gemma",
    "llama-2": "llama2",
    "llama-3.1": "llama3.1",
    "llama-3.2": "llama3.2",
    "llama-3.3": "llama3.3",
    "bigscience-bloom-rail-1.0": "bigscience-bloom-rail-1.0",
}
"""A page's licence in small letters -> its identifier on the Hub (hub-docs, docs/hub/repositories-licenses.md)."""

OWN = PurePath("src/deepspeed_recipes/samples")
"""Folder of the models that the project has derived from the page's model, under its licence."""


def of_base(recipe: Recipe) -> str | None:
    """Return the licence of the model that a recipe starts from, as stated by its page's `LICENCE`.

    None if it starts from another model than its page's, from random weights, or from a page outside the project, which
    would have to be executed.
    """
    if recipe.page or recipe.draft.enabled or recipe.family not in pages.families():
        return None
    module = pages.page(recipe.family)
    model = module.SIZES.get(recipe.size)
    started = portable_path(recipe.model.path)
    if model is None or (portable_path(model.path) != started and PurePath(started).parent != OWN):
        return None
    return pages.licence(module, recipe.size)


def metadata(licence: str | None) -> dict[str, str]:
    """Return a licence in the terms of a model card: the Hub's identifier, or `other` with its name."""
    if not licence:
        return {}
    known = _HUB_NAMES.get(licence.lower())
    return {"license": known} if known else {"license": "other", "license_name": licence.lower().replace(" ", "-")}
