"""Counts the parameters of a run's teacher, from the headers of its files or from its page."""

import json
from math import prod
from pathlib import Path

from ...recipe import pages
from ...recipe.recipe import Recipe


def parameters(recipe: Recipe) -> int:
    """Return the number of parameters of the teacher that is held during training.

    0 if there is none, or if the number is unknown, as for a model on the Hub without a page.
    """
    path = recipe.distill.teacher
    if not recipe.traits.teacher or not path or recipe.distill.top_k is not None:  # with top_k, freed before training
        return 0
    if files := list(Path(path).glob("*.safetensors")):
        return sum(map(_stored, files))
    models = (model for family in pages.families() for model in pages.page(family).SIZES.values())
    return next((model.parameters for model in models if model.path == path), 0)


def _stored(file: Path) -> int:
    """Return the number of elements in a safetensors file, whose JSON header follows its length in 8 bytes."""
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return sum(prod(about["shape"]) for name, about in header.items() if name != "__metadata__")
