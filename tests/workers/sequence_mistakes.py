"""Sequence parallelism with a mistake in it, which the gate must notice; executed on every rank."""

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from deepspeed_recipes.recipe.recipe import Layout
from deepspeed_recipes.training import run
from deepspeed_recipes.training.data.collate import IGNORED
from deepspeed_recipes.training.parallel import sequence


def main(folder: str, mistake: str) -> None:
    """Train with one thing wrong, and without the probe that notices most of them before the run."""
    MISTAKES[mistake]()
    run.sequence.check = lambda recipe, tokenizer: None
    run.main(folder)


def gradients_times_size() -> None:
    """Scale as the Trainer's own sequence parallelism does below ZeRO-3: a right loss, gradients times the size."""
    backward = DeepSpeedEngine.backward
    DeepSpeedEngine.backward = lambda self, loss, **options: backward(self, loss * 2, **options)


def masks_of_parts() -> None:
    """Make masks from the position ids of this rank's part alone."""
    sequence._whole = lambda part, group: torch.cat([part] * dist.get_world_size(group), dim=1)


def shifted_after_the_cut() -> None:
    """Lose the label of each part's last token."""
    cut = sequence.cut

    def late(batch: dict, place: object, layout: Layout) -> dict:
        part = cut(batch, place, layout)
        part["shift_labels"] = torch.nn.functional.pad(part["labels"][:, 1:], (0, 1), value=IGNORED)
        return part

    sequence.cut = late


def positions_from_zero() -> None:
    """Count positions from the start of each part."""
    cut = sequence.cut

    def again(batch: dict, place: object, layout: Layout) -> dict:
        part = cut(batch, place, layout)
        return part | {"position_ids": part["position_ids"] - part["position_ids"][:, :1]}

    sequence.cut = again


def heads_of_one() -> None:
    """Leave out the repetition of key/value heads: give each rank the first of them."""
    attention = sequence._attention

    def first(group, name, module, query, key, value, mask, **options):
        key, value = (part[:, :1].expand_as(part) for part in (key, value))
        return attention(group, name, module, query, key, value, mask, **options)

    sequence._attention = first


MISTAKES = {
    "gradients_times_size": gradients_times_size,
    "masks_of_parts": masks_of_parts,
    "shifted_after_the_cut": shifted_after_the_cut,
    "positions_from_zero": positions_from_zero,
    "heads_of_one": heads_of_one,
}
