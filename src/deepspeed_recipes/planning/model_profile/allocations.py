"""Measures and fits the allocations of a forward and a backward pass on the meta device.

Measured are the tensors that autograd saves and the peaks, for three batches; fitted is a training mode's memory.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import masking_utils

from ...recipe.errors import UserError
from ...recipe.files import Json
from .profile import SavedBytes

aten = torch.ops.aten
OUTSIDE, AFTER_LAYERS = -1, -2
"""Positions outside the numbered layers."""


class Kernels(TorchFunctionMode):
    """Allocates as CUDA's kernels would.

    Flash attention saves queries, keys, values, outputs and a logarithm per token and head. With a mask, or with heads
    wider than 256 or of two widths, it is the memory-efficient kernel, which also saves the mask as numbers. Dropout
    saves one byte per element. (PyTorch 2.13, aten/src/ATen/native/transformers: attention.cpp, cuda/sdp_utils.cpp.)
    Internal allocations of kernels are not measured: flash attention's backward pass accumulates the gradients of
    queries in fp32, 4 bytes per token and width, but by then at least as much of the layer has been freed.
    """

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple[Any, ...] = (), kwargs: Json | None = None
    ) -> object:
        if func is functional.scaled_dot_product_attention:
            return self.attention(*args, **kwargs or {})
        if func is functional.dropout:
            return self.dropout(*args, **kwargs or {})
        return func(*args, **kwargs or {})

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Return the result of `scaled_dot_product_attention`, whose arguments these are."""
        if attn_mask is None and query.shape[-1] == value.shape[-1] <= 256:
            return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
            attn_mask = attn_mask.expand(*query.shape[:2], -1, -1)
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
        )[0]

    def dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        """Return the result of `functional.dropout`, whose arguments these are."""
        return torch.native_dropout(input, p, True)[0] if training and p else input


class LiveBytes(TorchDispatchMode):
    """Tracks the bytes of all live storages, except those that existed before."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self.saved: dict[int, tuple[int, int]] = {}
        """By storage: the layer that first saved it for the backward pass, and its bytes."""
        self._known: dict[int, tuple[weakref.ref[object], int]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: Json | None = None
    ) -> object:
        with torch._C.DisableTorchFunction():  # shapes are computed in Python, which would call function modes
            result = func(*args, **(kwargs or {}))
        self.watch(one for one in tree_leaves(result) if isinstance(one, torch.Tensor))
        return result

    def watch(self, tensors: Iterable[torch.Tensor], counted: bool = True) -> None:
        """Count tensors that existed before, or exclude them, as weights."""
        for one in tensors:
            self._add(one.untyped_storage(), counted)

    def _add(self, storage: torch.UntypedStorage, counted: bool) -> None:
        key, size = storage._cdata, storage.nbytes() if counted else 0
        if key in self._known:
            return

        def drop(_: object) -> None:
            del self._known[key]
            self.saved.pop(key, None)
            self.bytes -= size

        self._known[key] = (weakref.ref(storage, drop), size)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def save(self, tensor: torch.Tensor, layer: int) -> None:
        """Record a tensor as saved for the backward pass; its storage counts in the layer that first saves it."""
        storage = tensor.untyped_storage()
        self._add(storage, counted=True)
        self.saved.setdefault(storage._cdata, (layer, self._known[storage._cdata][1]))

    def restart(self) -> int:
        """Reset the peak to the bytes that are live now, and return them."""
        self.peak = self.bytes
        return self.bytes


BATCH, SCANNED = (8, 512), (512, 8)
"""Sequences and length of the smallest batch: realistic, with a multiple of 64, the chunk of linear attention; and with
layers whose reference scan runs token by token, which takes minutes for such lengths."""
PARAMETERS = "adapter_parameters"

Key = tuple[str, int] | str
"""The names of measurements. By kind of layer: `saved` (by autograd), `backward_peak` (beyond the saved bytes) and
`adapter_parameters` (the number of trained ones). Once: `saved_outside_layers`, and `loss_peak`, the bytes beyond the
saved ones at the peak between the end of the last layer and the arrival of its gradient."""
Fit = Mapping[Key, SavedBytes]
"""Memory of a training mode as a function of the batch, or its difference from another mode."""


def measure(model: nn.Module, layers: Sequence[nn.Module], sequences: int, length: int) -> dict[Key, float]:
    """Run a causal language model with pairs of equal layers on the meta device, and measure the second of each pair.

    `layers` are the model's, two of each kind in succession; the batch has `sequences` of `length` tokens.
    """
    live, count, position = LiveBytes(), len(layers), {"layer": OUTSIDE}
    alive: dict[int, int] = {}
    peaks: dict[int, int] = {}

    def enter(number: int, hidden: torch.Tensor) -> None:
        position["layer"] = number
        if number == count:
            alive[AFTER_LAYERS] = live.restart()

        def gradient_arrived(gradient: torch.Tensor) -> None:
            peaks[number] = live.peak
            alive[number] = live.restart() - gradient.untyped_storage().nbytes()

        if hidden.requires_grad:
            hidden.register_hook(gradient_arrived)

    def drop_gradient(parameter: nn.Parameter) -> None:
        parameter.grad = None  # gradients belong to the model's states, not to its activations

    handles = [one.register_post_accumulate_grad_hook(drop_gradient) for one in model.parameters() if one.requires_grad]
    for number, layer in enumerate(layers):
        handles.append(
            layer.register_forward_pre_hook(
                lambda _, values, named, number=number: enter(number, values[0] if values else named["hidden_states"]),
                with_kwargs=True,
            )
        )
    handles.append(
        layers[-1].register_forward_hook(
            lambda _, __, output: enter(count, output[0] if isinstance(output, tuple) else output)
        )
    )
    live.watch((*model.parameters(), *model.buffers()), counted=False)

    def save(tensor: torch.Tensor) -> torch.Tensor:
        live.save(tensor, position["layer"])
        return tensor.detach()  # the tensor itself would close a reference cycle if the function returns it

    with live, saved_tensors_hooks(save, lambda tensor: tensor):
        tokens = torch.zeros(sequences, length, dtype=torch.long, device="meta")
        loss = model(input_ids=tokens, labels=tokens).loss
    saved: Counter[int] = Counter()
    for number, size in live.saved.values():
        saved[number] += size
    with live:
        loss.backward()
    for handle in handles:
        handle.remove()
    found: dict[Key, float] = {
        "saved_outside_layers": sum(saved.values()) - 2 * sum(saved[number] for number in range(1, count, 2)),
        "loss_peak": peaks[count] - alive[AFTER_LAYERS] - saved[count],
    }
    for kind, number in enumerate(range(1, count, 2)):
        found["saved", kind] = saved[number]
        found["backward_peak", kind] = peaks[number] - alive[number + 1]
        found[PARAMETERS, kind] = sum(one.numel() for one in layers[number].parameters() if one.requires_grad)
    return found


def combined(one: Fit, factor: float, other: Fit) -> Fit:
    """Return `one + factor * other`."""
    return {key: value + factor * other[key] for key, value in one.items()}


def smallest(model: nn.Module) -> tuple[int, int]:
    """Return the number of sequences and the length of the smallest batch that is measured."""
    return SCANNED if any(hasattr(one, "use_associative_scan") for one in model.modules()) else BATCH


def difference(model: nn.Module, fitted: Fit) -> Fit:
    """Return by how much a model exceeds a fit in the smallest batch, per token; parameters in total."""
    batch = smallest(model)
    more = {key: size - fitted[key].of(*batch) for key, size in measure_batch(model, batch).items()}
    return {
        key: SavedBytes(0, 0, size) if key[0] == PARAMETERS else SavedBytes(size / (batch[0] * batch[1]))
        for key, size in more.items()
    }


def fit(model: nn.Module, mask: bool = False) -> Fit:
    """Measure a model that has two layers of each kind with three batches, and fit their memory.

    With `mask`, attention gets one, as for packed sequences.
    """
    sequences, length = batch = smallest(model)
    third = (sequences, 3 * length) if batch == SCANNED else (2 * sequences, length)
    measured, long, more = (measure_batch(model, one, mask) for one in (batch, (sequences, 2 * length), third))
    found = {}
    for key, one in measured.items():
        # A scan saves no state before the first token, so its memory is not proportional to the length.
        fixed = 3 * (one - long[key]) + more[key] if batch == SCANNED else 2 * one - more[key]
        sequence = (one - fixed) / sequences
        per_pair = ((long[key] - fixed) / sequences - 2 * sequence) / (2 * length**2)
        found[key] = SavedBytes(sequence / length - per_pair * length, per_pair, fixed)
    return found


def measure_batch(model: nn.Module, batch: tuple[int, int], mask: bool = False) -> dict[Key, float]:
    """Measure a model that has two layers of each kind with one batch: its sequences and their length."""
    # transformers detects packed sequences by the values of positions, which the meta device lacks: replace the check.
    packed = torch.zeros_like if mask else lambda positions: None
    base = getattr(model, "get_base_model", lambda: model)()  # of a PeftModel, without importing PEFT
    with (
        mock.patch.object(masking_utils, "find_packed_sequence_indices", packed),
        mock.patch.object(torch, "autocast", lambda *_, **__: contextlib.nullcontext()),  # lacks the meta device
        Kernels(),
    ):
        return measure(model, decoder_layers(base), *batch)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the list of a decoder's layers."""
    count = model.config.get_text_config().num_hidden_layers
    found = [child for child in model.base_model.children() if isinstance(child, nn.ModuleList) and len(child) == count]
    if len(found) != 1 or model.get_output_embeddings() is None:
        raise UserError(
            f"{type(model).__name__} is not a decoder of the usual shape: an embedding, one list of num_hidden_layers "
            "layers, a norm, a head."
        )
    return found[0]
