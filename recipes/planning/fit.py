"""What a way of training takes as a function of the batch, solved from three batches on the meta device."""

import contextlib
from dataclasses import dataclass
from unittest import mock

import torch
from torch import nn
from transformers import masking_utils

from recipes.planning.anatomy import Saved
from recipes.planning.weigh import Kernels, Weights, weigh
from recipes.spec.errors import UserError

ROWS, LENGTH = 8, 512
"""Of the smallest batch: as many tokens as a real one has, and a multiple of 64, the chunk of linear attention."""


@dataclass(frozen=True)
class Fit:
    """What one way of training takes as a function of the batch, or what it takes more than another."""

    kinds: tuple[tuple[Saved, Saved, float], ...]
    """By kind of layer: what is saved, what its backward pass takes besides, and parameters of adapters."""
    ends: Saved
    loss: Saved

    def times(self, factor: float) -> "Fit":
        """Return a multiple."""
        kinds = [(factor * saved, factor * working, factor * added) for saved, working, added in self.kinds]
        return Fit(tuple(kinds), factor * self.ends, factor * self.loss)

    def plus(self, other: "Fit") -> "Fit":
        """Return both together."""
        pairs = zip(self.kinds, other.kinds, strict=True)
        kinds = [tuple(one + more for one, more in zip(*pair, strict=True)) for pair in pairs]
        return Fit(tuple(kinds), self.ends + other.ends, self.loss + other.loss)

    def to(self, other: Weights) -> "Fit":
        """Return what `other`, weighed with the smallest batch, takes more per token."""

        def more(own: Saved, its: float) -> Saved:
            return Saved((its - own.of(ROWS, LENGTH)) / (ROWS * LENGTH))

        kinds = [
            (more(saved, heavier), more(working, busier), parameters - added)
            for (saved, working, added), heavier, busier, parameters in zip(
                self.kinds, other.saved, other.working, other.added, strict=True
            )
        ]
        return Fit(tuple(kinds), more(self.ends, other.ends), more(self.loss, other.loss))


def fit(model: nn.Module, device: str, mask: bool = False) -> Fit:
    """Weigh a model that `_cut` has made with three batches, and solve."""
    one = weighed(model, device, mask)
    rows = weighed(model, device, mask, rows=2 * ROWS)
    long = weighed(model, device, mask, length=2 * LENGTH)
    saved = map(solve, one.saved, rows.saved, long.saved)
    working = map(solve, one.working, rows.working, long.working)
    kinds = tuple(zip(saved, working, one.added, strict=True))
    return Fit(kinds, solve(one.ends, rows.ends, long.ends), solve(one.loss, rows.loss, long.loss))


def weighed(model: nn.Module, device: str, mask: bool = False, rows: int = ROWS, length: int = LENGTH) -> Weights:
    """Weigh a model that `_cut` has made with one batch."""
    # Without the tokens' values nobody can tell whether rows hold several documents, so the answer is put in.
    packed = torch.zeros_like if mask else lambda positions: None
    base = getattr(model, "get_base_model", lambda: model)()  # of a PeftModel, for which PEFT need not be imported
    with (
        mock.patch.object(masking_utils, "find_packed_sequence_indices", packed),
        mock.patch.object(torch, "autocast", lambda *_, **__: contextlib.nullcontext()),  # knows no meta device
        Kernels(device),
    ):
        return weigh(model, decoder_layers(base), rows, length)


def solve(one: float, rows: float, long: float) -> Saved:
    """Return what gives the bytes of `ROWS` rows of `LENGTH` tokens, of twice as many, and of rows twice as long."""
    row = (rows - one) / ROWS
    fixed = one - ROWS * row
    per_pair = ((long - fixed) / ROWS - 2 * row) / (2 * LENGTH**2)
    return Saved(row / LENGTH - per_pair * LENGTH, per_pair, fixed)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the list of a decoder's layers.

    Raises:
        UserError: it has none, or several.
    """
    count = model.config.get_text_config().num_hidden_layers
    found = [child for child in model.base_model.children() if isinstance(child, nn.ModuleList) and len(child) == count]
    if len(found) != 1 or model.get_output_embeddings() is None:
        raise UserError(
            f"{type(model).__name__} is not a decoder of the usual shape: an embedding, one list of num_hidden_layers "
            "layers, a norm, a head."
        )
    return found[0]
