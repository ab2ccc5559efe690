"""Measures allocations of a forward and a backward pass on the meta device: tensors that autograd saves, and peaks."""

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
OUTSIDE, AFTER_LAYERS = -1, -2
"""Positions outside the numbered layers."""


class Kernels(TorchFunctionMode):
    """Allocates as another device's kernels would; all differences between devices are in this class.

    - Attention. CUDA: flash attention saves queries, keys, values, outputs and a logarithm per token and head. With a
      mask, or with heads wider than 256 or of two widths, it is the memory-efficient kernel, which also saves the mask
      as numbers. CPU: flash attention for every mask; if heads have two widths, all scores are saved.
    - Dropout. CUDA saves one byte per element, the CPU a factor in the element's type.

    (PyTorch 2.13, aten/src/ATen/native/transformers: attention.cpp, cuda/sdp_utils.cpp, sdp_utils_cpp.cpp.)
    Internal allocations of kernels are not measured: flash attention's backward pass accumulates the gradients of
    queries in fp32, 4 bytes per token and width, but by then at least as much of the layer has been freed.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self._attention(func, *args, **kwargs)
        if func is functional.dropout and self.device == "cuda":
            return self._dropout(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self,
        func: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        one_width = query.shape[-1] == value.shape[-1]
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
        if self.device == "cpu" and one_width and not dropout_p:
            return aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
            )[0]
        if self.device == "cpu":
            return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if attn_mask is None and one_width and query.shape[-1] <= 256:
            return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*query.shape[:2], -1, -1)
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
        )[0]

    def _dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        return torch.native_dropout(input, p, True)[0] if training and p else input


class LiveBytes(TorchDispatchMode):
    """Tracks the bytes of all live storages, except those that existed before."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self.saved: dict[int, tuple[int, int]] = {}
        """By storage: the layer that first saved it for the backward pass, and its bytes."""
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # shapes are computed in Python, which would call function modes
            result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor):
                self._add(one.untyped_storage())
        return result

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Exclude tensors, the weights, from the count."""
        for one in tensors:
            self._add(one.untyped_storage(), counted=False)

    def _add(self, storage: torch.UntypedStorage, counted: bool = True) -> None:
        key, size = storage._cdata, storage.nbytes() if counted else 0
        if key in self._known:
            return

        def drop(_: Any) -> None:
            del self._known[key]
            self.saved.pop(key, None)
            self.bytes -= size

        self._known[key] = (weakref.ref(storage, drop), size)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors although they existed before."""
        for one in tensors:
            self._add(one.untyped_storage())

    def save(self, tensor: torch.Tensor, layer: int) -> None:
        """Record a tensor as saved for the backward pass; its storage counts in the layer that first saves it."""
        storage = tensor.untyped_storage()
        self._add(storage)
        self.saved.setdefault(storage._cdata, (layer, self._known[storage._cdata][1]))

    def restart(self) -> int:
        """Reset the peak to the bytes that are live now, and return them."""
        self.peak = self.bytes
        return self.bytes


@dataclass(frozen=True)
class MeasuredBytes:
    """Bytes of one forward and backward pass."""

    saved: tuple[int, ...]
    """Bytes saved by autograd, by kind of layer."""
    backward_peak: tuple[int, ...]
    """Bytes at the peak of the backward pass beyond the saved ones, by kind of layer."""
    trained: tuple[int, ...]
    """Number of trained parameters, by kind of layer."""
    saved_outside_layers: int
    loss_peak: int
    """Bytes beyond the saved ones at the peak between the end of the last layer and the arrival of its gradient."""


def measure(model: nn.Module, layers: Sequence[nn.Module], sequences: int, length: int) -> MeasuredBytes:
    """Run a causal language model with pairs of equal layers on the meta device, and measure the second of each pair.

    Args:
        model: a model on the meta device.
        layers: the model's layers, two of each kind in succession.
        sequences: number of sequences in the batch.
        length: tokens per sequence.
    """
    live, count, position = LiveBytes(), len(layers), {"layer": OUTSIDE}
    alive: dict[int, int] = {}
    peaks: dict[int, int] = {}

    def enter(number: int, hidden: torch.Tensor) -> None:
        position["layer"] = number

        def gradient_arrived(gradient: torch.Tensor) -> None:
            peaks[number] = live.peak
            alive[number] = live.restart() - gradient.untyped_storage().nbytes()

        if hidden.requires_grad:
            hidden.register_hook(gradient_arrived)

    def leave_last(hidden: torch.Tensor) -> None:
        alive[AFTER_LAYERS] = live.restart()
        enter(count, hidden)

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
            lambda _, __, output: leave_last(output[0] if isinstance(output, tuple) else output)
        )
    )
    live.ignore((*model.parameters(), *model.buffers()))

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
    seconds = range(1, count, 2)
    return MeasuredBytes(
        saved=tuple(saved[number] for number in seconds),
        backward_peak=tuple(peaks[number] - alive[number + 1] for number in seconds),
        trained=tuple(sum(one.numel() for one in layers[at].parameters() if one.requires_grad) for at in seconds),
        saved_outside_layers=sum(saved.values()) - 2 * sum(saved[number] for number in seconds),
        loss_peak=peaks[count] - alive[AFTER_LAYERS] - saved[count],
    )
