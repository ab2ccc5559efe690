"""The parameters of a run's teacher: counted in the headers of its files, or as its page states them."""

import json
from math import prod
from pathlib import Path

from ...recipe import pages
from ...recipe.recipe import Recipe


def parameters(recipe: Recipe) -> int:
    """Return the parameters of the model that is held beside the one that trains; 0 without one.

    0 too where it is not known: of a model on the Hub that no page is about.
    """
    path = recipe.distill.teacher
    if not recipe.traits.teacher or not path or recipe.distill.top_k is not None:  # else it is gone before training
        return 0
    if files := list(Path(path).glob("*.safetensors")):
        return sum(map(_stored, files))
    models = (model for family in pages.families() for model in pages.page(family).SIZES.values())
    return next((model.parameters for model in models if model.path == path), 0)


def _stored(file: Path) -> int:
    """Return the numbers in a safetensors file: its header is JSON, after its length in 8 bytes."""
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return sum(prod(about["shape"]) for name, about in header.items() if name != "__metadata__")
