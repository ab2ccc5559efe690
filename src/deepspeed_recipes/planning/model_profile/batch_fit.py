"""Fits the memory of a training mode as a function of the batch, from three batches measured on the meta device."""

import contextlib
from dataclasses import dataclass
from unittest import mock

import torch
from torch import nn
from transformers import masking_utils

from ...recipe.errors import UserError
from .allocations import Kernels, MeasuredBytes, measure
from .profile import SavedBytes

SEQUENCES, LENGTH = 8, 512
"""Size of the smallest batch: realistic, with a length that is a multiple of 64, the chunk of linear attention."""


@dataclass(frozen=True)
class LayerFit:
    """Memory of a training mode in one kind of layer."""

    saved: SavedBytes
    backward_peak: SavedBytes
    """Peak of the backward pass, beyond the saved bytes."""
    adapter_parameters: float

    def __add__(self, other: "LayerFit") -> "LayerFit":
        """Return the sum."""
        return LayerFit(
            self.saved + other.saved,
            self.backward_peak + other.backward_peak,
            self.adapter_parameters + other.adapter_parameters,
        )

    def __rmul__(self, factor: float) -> "LayerFit":
        """Return a multiple."""
        return LayerFit(factor * self.saved, factor * self.backward_peak, factor * self.adapter_parameters)


@dataclass(frozen=True)
class BatchFit:
    """Memory of a training mode as a function of the batch, or its difference from another mode."""

    layers: tuple[LayerFit, ...]
    """One per kind of layer."""
    saved_outside_layers: SavedBytes
    loss_peak: SavedBytes

    def __add__(self, other: "BatchFit") -> "BatchFit":
        """Return the sum."""
        return BatchFit(
            tuple(one + more for one, more in zip(self.layers, other.layers, strict=True)),
            self.saved_outside_layers + other.saved_outside_layers,
            self.loss_peak + other.loss_peak,
        )

    def __rmul__(self, factor: float) -> "BatchFit":
        """Return a multiple."""
        layers = tuple(factor * layer for layer in self.layers)
        return BatchFit(layers, factor * self.saved_outside_layers, factor * self.loss_peak)

    def difference_to(self, measured: MeasuredBytes) -> "BatchFit":
        """Return by how much `measured`, of the smallest batch, exceeds this fit, per token."""

        def more(own: SavedBytes, theirs: float) -> SavedBytes:
            return SavedBytes((theirs - own.of(SEQUENCES, LENGTH)) / (SEQUENCES * LENGTH))

        layers = tuple(
            LayerFit(
                more(layer.saved, measured.saved[kind]),
                more(layer.backward_peak, measured.backward_peak[kind]),
                measured.trained[kind] - layer.adapter_parameters,
            )
            for kind, layer in enumerate(self.layers)
        )
        return BatchFit(
            layers,
            more(self.saved_outside_layers, measured.saved_outside_layers),
            more(self.loss_peak, measured.loss_peak),
        )


def fit(model: nn.Module, device: str, mask: bool = False) -> BatchFit:
    """Measure a model that has two layers of each kind with three batches, and fit their memory.

    Args:
        model: a model on the meta device.
        device: the device whose kernels to imitate, "cuda" or "cpu".
        mask: whether attention gets a mask, as for packed sequences.
    """
    one = measure_batch(model, device, mask)
    twice = measure_batch(model, device, mask, sequences=2 * SEQUENCES)
    long = measure_batch(model, device, mask, length=2 * LENGTH)
    saved = map(solve, one.saved, twice.saved, long.saved)
    peaks = map(solve, one.backward_peak, twice.backward_peak, long.backward_peak)
    return BatchFit(
        tuple(map(LayerFit, saved, peaks, one.trained)),
        solve(one.saved_outside_layers, twice.saved_outside_layers, long.saved_outside_layers),
        solve(one.loss_peak, twice.loss_peak, long.loss_peak),
    )


def measure_batch(
    model: nn.Module, device: str, mask: bool = False, sequences: int = SEQUENCES, length: int = LENGTH
) -> MeasuredBytes:
    """Measure a model that has two layers of each kind with one batch."""
    # transformers detects packed sequences by the values of positions, which the meta device lacks: replace the check.
    packed = torch.zeros_like if mask else lambda positions: None
    base = getattr(model, "get_base_model", lambda: model)()  # of a PeftModel, without importing PEFT
    with (
        mock.patch.object(masking_utils, "find_packed_sequence_indices", packed),
        mock.patch.object(torch, "autocast", lambda *_, **__: contextlib.nullcontext()),  # lacks the meta device
        Kernels(device),
    ):
        return measure(model, decoder_layers(base), sequences, length)


def solve(one: float, twice: float, long: float) -> SavedBytes:
    """Return the function of the batch that reproduces three measurements.

    Args:
        one: bytes for `SEQUENCES` sequences of `LENGTH` tokens.
        twice: bytes for twice as many sequences.
        long: bytes for sequences twice as long.
    """
    sequence = (twice - one) / SEQUENCES
    fixed = one - SEQUENCES * sequence
    per_pair = ((long - fixed) / SEQUENCES - 2 * sequence) / (2 * LENGTH**2)
    return SavedBytes(sequence / LENGTH - per_pair * LENGTH, per_pair, fixed)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the list of a decoder's layers.

    Raises:
        UserError: the model has no such list, or several.
    """
    count = model.config.get_text_config().num_hidden_layers
    found = [child for child in model.base_model.children() if isinstance(child, nn.ModuleList) and len(child) == count]
    if len(found) != 1 or model.get_output_embeddings() is None:
        raise UserError(
            f"{type(model).__name__} is not a decoder of the usual shape: an embedding, one list of num_hidden_layers "
            "layers, a norm, a head."
        )
    return found[0]
