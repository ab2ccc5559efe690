"""Removes the paths of this machine from values, so that a folder can be read, and reproduced, on another."""

import re
from pathlib import Path, PurePath
from typing import Any

from ...recipe.conversions import from_dict, to_dict
from ...recipe.project import CONFIGS, PACKAGE
from ...recipe.recipe import Recipe, names

_SNAPSHOT = re.compile(r"/(?:models|datasets)--([^/]+?)--([^/]+)/snapshots/[0-9a-f]+/?$")
"""Path of a repository in Hugging Face's cache."""
_OWN = PurePath("src", "deepspeed_recipes")
"""Path of the package in a checkout, whatever the checkout's folder is."""
_BEFORE = ("recipes", "samples")
"""The samples' place in exports from before the package moved out of `recipes/`."""


def portable(value: object) -> Any:
    """Return JSON-like values in which no string is an absolute path, or a list of these with commas."""
    if isinstance(value, dict):
        return {key: portable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [portable(inner) for inner in value]
    if isinstance(value, str) and any(PurePath(name).is_absolute() for name in names(value)):
        return ",".join(portable_path(name) for name in names(value))
    return value


def portable_path(path: str) -> str:
    """Return a path that is the same on every machine.

    A file of the project gets its place in a checkout, a file of `configs/` its name, a file in Hugging Face's cache
    its Hub id, and any other file its name alone; a relative path and a Hub id are unchanged.
    """
    place = Path(path)
    if not place.is_absolute():
        return path
    if cached := _SNAPSHOT.search(path):
        return f"{cached[1]}/{cached[2]}"
    if place.parent == CONFIGS:
        return place.name
    for folder, name in ((CONFIGS, "configs"), (PACKAGE, _OWN)):
        if place.is_relative_to(folder):
            return str(PurePath(name) / place.relative_to(folder))
    return place.name


def portable_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe with portable paths."""
    return from_dict(portable(to_dict(recipe)))


def own_path(path: str) -> Path | None:
    """Return the file of a portable path `src/deepspeed_recipes/...`, or None if it does not exist."""
    place = PurePath(path)
    if place.parts[:2] == _BEFORE:
        place = _OWN / place.relative_to(_BEFORE[0])
    inside = PACKAGE / place.relative_to(_OWN) if place.is_relative_to(_OWN) else None
    return inside if inside is not None and inside.exists() else None
