"""Counts the parameters of a run's teacher, from the headers of its files or from its page."""

import json
from math import prod
from pathlib import Path

from ...recipe import pages
from ...recipe.methods import Distill
from ...recipe.recipe import Recipe


def parameters(recipe: Recipe) -> int:
    """Return the number of parameters of the teacher that is held during training.

    0 if there is none, or if the number is unknown, as for a model on the Hub without a page.
    """
    method = recipe.method
    if not isinstance(method, Distill) or not method.teacher or method.top_k is not None:  # top_k frees it early
        return 0
    path = method.teacher
    if files := list(Path(path).glob("*.safetensors")):
        return sum(map(_stored, files))
    models = (model for family in pages.families() for model in pages.page(family).SIZES.values())
    return next((model.parameters for model in models if model.path == path), 0)


def _stored(file: Path) -> int:
    """Return the number of elements in a safetensors file, whose JSON header follows its length in 8 bytes."""
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return sum(prod(about["shape"]) for name, about in header.items() if name != "__metadata__")
