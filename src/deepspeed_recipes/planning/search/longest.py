"""Finds the longest sequence with which a model can be trained on given hardware."""

from dataclasses import replace

from ...recipe.compatibility import positions
from .plans import PlanRequest, SearchResult
from .strategies import search

STEP = 1024
"""In tokens. Lengths are multiples of it, so that sequences can be split over ranks."""
MOST = 2**20
"""The longest sequence to try, in tokens, for a model whose positions are not limited."""


def longest(request: PlanRequest) -> tuple[PlanRequest, SearchResult]:
    """Return the request with the longest sequence that fits, to within about 6 %, and its plans.

    If nothing fits, the sequence has `STEP` tokens. The search goes down from the model's maximum number of positions:
    a short sequence can need more memory than a long one, whose loss is computed in tiles.
    """
    too_long = fits = max(1, int(min(positions(request.recipe.model.config), MOST)) // STEP)
    found = _at(request, fits)
    while not found[1].best and fits > 1:
        too_long, fits = fits, fits // 2
        found = _at(request, fits)
    while found[1].best and too_long - fits > max(1, fits // 16):
        middle = (fits + too_long) // 2
        tried = _at(request, middle)
        fits, too_long, found = (middle, too_long, tried) if tried[1].best else (fits, middle, found)
    return found


def sentence(request: PlanRequest) -> str:
    """Return the answer as a sentence, given the request that `longest` returned."""
    length = request.recipe.sequence_length
    most = positions(request.recipe.model.config)
    why = "to within about 6 %; with a longer one, the high end of the memory range would not fit"
    if length + STEP > most:
        why = "the model has no more positions"
    return f"The longest sequence that fits has {length:,} tokens ({why})."


def _at(request: PlanRequest, thousands: int) -> tuple[PlanRequest, SearchResult]:
    sized = replace(request, recipe=replace(request.recipe, sequence_length=STEP * thousands))
    return sized, search(sized)
