"""The longest sequence with which a model can be trained on given hardware."""

from dataclasses import replace

from ...recipe.limits import positions
from .plans import PlanRequest, SearchResult
from .strategies import search

STEP = 1024
"""Tokens; lengths are multiples of it, so that sequences can be split over ranks."""
MOST = 2**20
"""Tokens to try for a model whose positions are not limited."""


def longest(request: PlanRequest) -> tuple[PlanRequest, SearchResult]:
    """Return the request with the longest sequence that fits, to about 6 %, and its plans; `STEP` where nothing fits.

    From the model's positions downwards, since a short sequence may need more than a long one, whose loss is tiled.
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
    """Return what the answer means, given the request that `longest` has returned."""
    length = request.recipe.sequence_length
    most = positions(request.recipe.model.config)
    why = "to about 6 %; with longer ones the high value of the range would not fit"
    if length + STEP > most:
        why = "the model has no more positions"
    return f"The longest sequence that fits has {length:,} tokens ({why})."


def _at(request: PlanRequest, thousands: int) -> tuple[PlanRequest, SearchResult]:
    sized = replace(request, recipe=replace(request.recipe, sequence_length=STEP * thousands))
    return sized, search(sized)
