"""Tiles with a mistake in them, which the gate must notice; executed on every rank."""

import torch

from deepspeed_recipes.training import run
from deepspeed_recipes.training.model import transforms


def main(folder: str, mistake: str) -> None:
    """Train with one thing wrong."""
    MISTAKES[mistake]()
    run.main(folder)


def mean_of_tiles() -> None:
    """Weigh every tile's loss, here every micro-batch's, the same, however many tokens it has."""
    add = transforms.add_fused_lm_head

    def add_one_that_averages(model: torch.nn.Module) -> None:
        add(model)
        fused = model.forward
        model.forward = lambda *arguments, num_items_in_batch=None, **inputs: fused(*arguments, **inputs)

    transforms.add_fused_lm_head = add_one_that_averages


def a_tile_forgotten() -> None:
    """Leave the last tile of every feed-forward layer as it came."""
    in_tiles = transforms._in_tiles

    def forgetful(forward, tiles: int, hidden: torch.Tensor) -> torch.Tensor:
        computed = in_tiles(forward, tiles, hidden)
        kept = hidden.shape[1] - hidden.shape[1] // tiles
        return torch.cat([computed[:, :kept], hidden[:, kept:]], dim=1)

    transforms._in_tiles = forgetful


MISTAKES = {"mean_of_tiles": mean_of_tiles, "a_tile_forgotten": a_tile_forgotten}
