"""Values without the paths of this machine, so that a folder can be read, and reproduced, on another."""

import re
from pathlib import Path, PurePath
from typing import Any

from ...recipe.conversions import from_dict, to_dict
from ...recipe.project import CONFIGS, PACKAGE
from ...recipe.recipe import Recipe, names

_SNAPSHOT = re.compile(r"/(?:models|datasets)--([^/]+?)--([^/]+)/snapshots/[0-9a-f]+/?$")
"""Where Hugging Face's cache keeps a repository."""
_OWN = PurePath("src", "deepspeed_recipes")
"""Where a checkout has the package, whatever this one's folder is."""
_BEFORE = ("recipes", "samples")
"""How exports called the project's samples when the package stood in `recipes/`."""


def portable(value: Any) -> Any:
    """Return JSON-like values in which no string is an absolute path, or a list of them with commas."""
    if isinstance(value, dict):
        return {key: portable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [portable(inner) for inner in value]
    if isinstance(value, str) and any(PurePath(name).is_absolute() for name in names(value)):
        return ",".join(portable_path(name) for name in names(value))
    return value


def portable_path(path: str) -> str:
    """Return a path as it is on every machine.

    A file of the project by its place in a checkout, one of `configs/` by its name, what Hugging Face's cache holds by
    its Hub id, and any other file by its name alone; a relative path, or a Hub id, as it is.
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
    """Return the file that `portable_path` calls `src/deepspeed_recipes/...`, or None if there is none."""
    place = PurePath(path)
    if place.parts[:2] == _BEFORE:
        place = _OWN / place.relative_to(_BEFORE[0])
    inside = PACKAGE / place.relative_to(_OWN) if place.is_relative_to(_OWN) else None
    return inside if inside is not None and inside.exists() else None
