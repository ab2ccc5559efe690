"""Fits the memory of a training mode as a function of the batch, from three batches measured on the meta device."""

import contextlib
from collections.abc import Mapping
from unittest import mock

import torch
from torch import nn
from transformers import masking_utils

from ...recipe.errors import UserError
from .allocations import Kernels, MeasuredBytes, measure
from .profile import SavedBytes

SEQUENCES, LENGTH = 8, 512
"""Size of the smallest batch: realistic, with a length that is a multiple of 64, the chunk of linear attention."""


Fit = Mapping[tuple[str, int] | str, SavedBytes]
"""Memory of a training mode as a function of the batch, or its difference from another mode: by kind of layer `saved`,
`backward_peak` and `adapter_parameters` (a number, as `fixed`), and `saved_outside_layers` and `loss_peak`."""
PARAMETERS = "adapter_parameters"


def by_key(measured: MeasuredBytes) -> dict[tuple[str, int] | str, float]:
    """Return the measurements by the keys of a `Fit`."""
    layers = {"saved": measured.saved, "backward_peak": measured.backward_peak, PARAMETERS: measured.trained}
    found: dict[tuple[str, int] | str, float] = {
        (name, kind): size for name, sizes in layers.items() for kind, size in enumerate(sizes)
    }
    return found | {"saved_outside_layers": measured.saved_outside_layers, "loss_peak": measured.loss_peak}


def combined(one: Fit, factor: float, other: Fit) -> Fit:
    """Return `one + factor * other`."""
    return {key: value + factor * other[key] for key, value in one.items()}


def difference(measured: MeasuredBytes, fitted: Fit) -> Fit:
    """Return by how much `measured`, of the smallest batch, exceeds a fit, per token; parameters in total."""
    more = {key: size - fitted[key].of(SEQUENCES, LENGTH) for key, size in by_key(measured).items()}
    return {
        key: SavedBytes(0, 0, size) if key[0] == PARAMETERS else SavedBytes(size / (SEQUENCES * LENGTH))
        for key, size in more.items()
    }


def fit(model: nn.Module, device: str, mask: bool = False) -> Fit:
    """Measure a model that has two layers of each kind with three batches, and fit their memory.

    Args:
        model: a model on the meta device.
        device: the device whose kernels to imitate, "cuda" or "cpu".
        mask: whether attention gets a mask, as for packed sequences.
    """
    one = by_key(measure_batch(model, device, mask))
    twice = by_key(measure_batch(model, device, mask, sequences=2 * SEQUENCES))
    long = by_key(measure_batch(model, device, mask, length=2 * LENGTH))
    return {key: solve(size, twice[key], long[key]) for key, size in one.items()}


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
