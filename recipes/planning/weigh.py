"""Weigh what a forward and a backward pass take on the meta device: what autograd keeps, and what lives besides."""

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
NOWHERE, END = -1, -2


class Kernels(TorchFunctionMode):
    """Compute as a device would of which there is none here: all that differs between devices stands in this class.

    - Attention. CUDA: flash attention keeps queries, keys, values, outputs and a logarithm per token and head; with a
      mask, or heads wider than 256 or of two widths, the memory-efficient kernel, which keeps the mask too, as numbers.
      CPU: its flash attention for every mask, and all scores where heads have two widths.
    - Dropout. CUDA keeps one byte per element, the CPU a factor in the element's type.

    (PyTorch 2.13, aten/src/ATen/native/transformers: attention.cpp, cuda/sdp_utils.cpp, sdp_utils_cpp.cpp.)
    What kernels take for themselves is not seen here: flash attention's backward pass accumulates queries' gradients in
    fp32, 4 bytes per token and width, at a moment when that much and more of the layer has been released.
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


class Live(TorchDispatchMode):
    """Follows the bytes of all storages that live, apart from those that were there before."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self.saved: dict[int, tuple[int, int]] = {}
        """By storage: where it was saved for the backward pass, and its bytes."""
        self._known: dict[int, tuple[weakref.ref, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # shapes are computed in Python, through every function mode
            result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor):
                self._add(one.untyped_storage())
        return result

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave these out: weights."""
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
        """Count these too, which were there before."""
        for one in tensors:
            self._add(one.untyped_storage())

    def save(self, tensor: torch.Tensor, where: int) -> None:
        """Note that a tensor is kept for the backward pass; its storage counts where it is first kept."""
        storage = tensor.untyped_storage()
        self._add(storage)
        self.saved.setdefault(storage._cdata, (where, self._known[storage._cdata][1]))

    def restart(self) -> int:
        """Forget the peak, and return what lives now."""
        self.peak = self.bytes
        return self.bytes


@dataclass(frozen=True)
class Weights:
    """Bytes of one forward and backward pass."""

    saved: tuple[int, ...]
    """By kind of layer."""
    working: tuple[int, ...]
    """By kind of layer: at the worst moment of its backward pass, beyond what was saved."""
    added: tuple[int, ...]
    """By kind of layer: parameters that are trained."""
    ends: int
    """Saved outside the layers."""
    loss: int
    """After the last layer, until its gradient is there: at the worst moment, beyond what was saved."""


def weigh(model: nn.Module, layers: Sequence[nn.Module], rows: int, length: int) -> Weights:
    """Run a causal language model on the meta device, its layers two by two of a kind, and weigh the second ones."""
    live, count, place = Live(), len(layers), {"is": NOWHERE}
    alive: dict[int, int] = {}
    peaks: dict[int, int] = {}

    def enter(number: int, hidden: torch.Tensor) -> None:
        place["is"] = number

        def passed(gradient: torch.Tensor) -> None:
            peaks[number] = live.peak
            alive[number] = live.restart() - gradient.untyped_storage().nbytes()

        if hidden.requires_grad:
            hidden.register_hook(passed)

    def end(hidden: torch.Tensor) -> None:
        alive[END] = live.restart()
        enter(count, hidden)

    def forget(parameter: nn.Parameter) -> None:
        parameter.grad = None  # what becomes of gradients is a matter of states

    handles = [one.register_post_accumulate_grad_hook(forget) for one in model.parameters() if one.requires_grad]
    for number, layer in enumerate(layers):
        handles.append(
            layer.register_forward_pre_hook(
                lambda _, values, named, number=number: enter(number, values[0] if values else named["hidden_states"]),
                with_kwargs=True,
            )
        )
    handles.append(layers[-1].register_forward_hook(lambda *_: end(_[2][0] if isinstance(_[2], tuple) else _[2])))
    live.ignore((*model.parameters(), *model.buffers()))

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        live.save(tensor, place["is"])
        return tensor.detach()  # itself would close a circle, if it is what the function returns

    with live, saved_tensors_hooks(keep, lambda tensor: tensor):
        tokens = torch.zeros(rows, length, dtype=torch.long, device="meta")
        loss = model(input_ids=tokens, labels=tokens).loss
    saved = Counter()
    for number, size in live.saved.values():
        saved[number] += size
    with live:
        loss.backward()
    for handle in handles:
        handle.remove()
    seconds = range(1, count, 2)
    return Weights(
        saved=tuple(saved[number] for number in seconds),
        working=tuple(peaks[number] - alive[number + 1] for number in seconds),
        added=tuple(sum(one.numel() for one in layers[at].parameters() if one.requires_grad) for at in seconds),
        ends=sum(saved.values()) - 2 * sum(saved[number] for number in seconds),
        loss=peaks[count] - alive[END] - saved[count],
    )
