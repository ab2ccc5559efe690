"""Warns about a borrowed recipe, set for a model other than `model.path`. Standard library only."""

import json
import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from ...recipe import overrides, pages
from ...recipe.recipe import Model, Recipe
from ...recipe.run_folder import read_json

FAR = 10
"""Ratio of parameter counts above which a recipe's settings no longer suit a model."""
SETTINGS = ("learning_rate", "precision", "sequence_length")
"""Settings that depend most on the model."""


@dataclass(frozen=True)
class Found:
    """The properties of a model that are found without loading it."""

    kinds: tuple[str, ...] = ()
    """The `model_type` of the model and of its text model; empty if unknown."""
    parameters: float | None = None
    exact: bool = True
    """True if the parameters were counted, False if their number is from the model's name."""


def warning(recipe: Recipe, page: Recipe, given: Collection[str]) -> str | None:
    """Return a warning if settings are meant for another architecture or size, or None.

    Args:
        recipe: the recipe, with the model's path as the ranks open it.
        page: the recipe before the user changed it.
        given: the keys that the user has set.
    """
    borrowed = [key for key in SETTINGS if key not in given]
    if "model.path" not in given or recipe.draft.enabled or not borrowed:
        return None
    found, theirs = look(recipe.model.path), page.model
    if _same_kind(found, theirs) and not (found.parameters and _distance(found, theirs) > math.log(FAR)):
        return None
    about = "" if found.exact else "about "
    size = [f"{about}{pages.human(round(found.parameters))} parameters"] if found.parameters else []
    return (
        f"warning: a borrowed recipe: {' '.join(overrides.as_typed(recipe, borrowed))} are the settings of "
        f"{pages.typed(page)}, a {theirs.config.get('model_type')} with {pages.human(theirs.parameters)} parameters; "
        f"{recipe.model.path} is {' with '.join([*found.kinds[:1], *size]) or 'another model'}."
        f"{_advice(recipe, found)}"
    )


def look(path: str) -> Found:
    """Return a model's properties from its folder or, for a Hub id, from its page or its name."""
    folder = Path(path)
    if folder.is_dir():
        config = read_json(folder / "config.json")
        kinds = (config.get("model_type"), (config.get("text_config") or {}).get("model_type"))
        return Found(tuple(kind for kind in kinds if kind), sum(map(_elements, folder.glob("*.safetensors"))) or None)
    for _, model in _models():
        if model.path == path:
            return Found((model.config["model_type"],), model.parameters)
    named = re.search(r"(?<![\d.])(\d+(?:\.\d+)?)([BbMm])(?![a-zA-Z])", path)
    return Found((), float(named[1]) * (1e9 if named[2] in "Bb" else 1e6) if named else None, exact=False)


def _elements(file: Path) -> int:
    """Return the number of elements in a safetensors file's header, or 0 if the file is damaged."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(min(length, 2**27)))
        return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return 0  # the ranks report the error


def _same_kind(found: Found, model: Model) -> bool:
    return not found.kinds or model.config.get("model_type") in found.kinds


def _distance(found: Found, model: Model) -> float:
    """Return the distance between two sizes as a logarithm, or 0 if a size is unknown."""
    return abs(math.log(found.parameters / model.parameters)) if found.parameters and model.parameters else 0.0


def _models() -> Iterator[tuple[str, Model]]:
    """Yield every model of the catalogue with its recipe's name, except the tiny models."""
    for family in pages.families():
        if not family.startswith("tiny"):
            yield from ((f"{family}-{size}", model) for size, model in pages.page(family).SIZES.items())


def _advice(recipe: Recipe, found: Found) -> str:
    """Return the recipe that fits: the same architecture, or else the family in the name, at the nearest size."""
    own = [(name, model) for name, model in _models() if found.kinds and model.config.get("model_type") in found.kinds]
    title = Path(recipe.model.path).name.lower()
    alike = [(name, model) for name, model in _models() if re.match(r"[a-z]+", name)[0] in title]  # type: ignore[index]
    having = [
        (name, model)
        for name, model in own or alike
        if recipe.variant in pages.variants(pages.page(pages.split(name)[0]))
        and _distance(found, model) <= math.log(FAR)
    ]
    if not having:
        return " Set these for your model."
    name, _ = min(having, key=lambda one: _distance(found, one[1]))
    return f"\nWhat fits: ds-recipes launch {name} {recipe.variant} model.path={recipe.model.path}"
