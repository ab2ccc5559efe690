"""Trains with one mistake in the numbers of the layers."""

from dataclasses import replace

from deepspeed_recipes.training import run
from deepspeed_recipes.training.callbacks import layer_stats
from deepspeed_recipes.training.parallel import holdings


def main(folder: str, mistake: str) -> None:
    """Train what `folder`/recipe.json says, with `mistake`."""
    MISTAKES[mistake]()
    run.main(folder)


def after_clipping() -> None:
    """Say the norms as the optimizer has them."""
    layer_stats._unclipped = lambda engine: 1.0


def counted_on_every_rank() -> None:
    """Add up what every tensor-parallel rank holds, as if each had its own."""
    place = holdings.distributed.place
    holdings.distributed.place = lambda layout: replace(place(layout), tensor=0)


def without_decay() -> None:
    """Forget that AdamW decays weights."""
    update = layer_stats._adam_update
    layer_stats._adam_update = lambda *given: update(*given[:-1], {**given[-1], "weight_decay": 0.0})


MISTAKES = {one.__name__: one for one in (after_clipping, counted_on_every_rank, without_decay)}
