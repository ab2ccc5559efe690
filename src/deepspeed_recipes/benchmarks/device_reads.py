"""Counts device reads: places where Python waits for a tensor's values, which drains a GPU's queue of work."""

import traceback
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

OF_VALUES = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2")
"""Operations whose result or output shape depends on the values: `item()`, `bool()`, `x[mask]`."""


class Reads(TorchDispatchMode):
    """Counts reads of tensors' values by Python, and blocking copies from a GPU, backward passes included.

    Only this thread is counted: on a GPU, not the threads that PyTorch starts for the backward pass.
    """

    def __init__(self, places: bool = False) -> None:
        """`places`: also record the lines that cause reads, which is slow."""
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.places: Counter[str] | None = Counter() if places else None

    @property
    def total(self) -> int:
        """The number of reads."""
        return self.counts.total()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        name = function.overloadpacket.__name__
        if name in OF_VALUES or _selects(name, arguments) or _leaves_the_device(name, arguments, options):
            self.counts[name] += 1
            if self.places is not None:
                self.places["".join(traceback.format_stack(limit=6)[:-1])] += 1
        return function(*arguments, **options)


def _selects(name: str, arguments: Any) -> bool:
    """Return whether a mask determines the number of elements; assigning a single value does not depend on it."""
    if name == "index" or (name in ("index_put", "index_put_", "_index_put_impl_") and arguments[2].numel() != 1):
        masks = arguments[1]
    else:
        return False
    return any(mask is not None and mask.dtype == torch.bool for mask in masks)


def _leaves_the_device(name: str, arguments: Any, options: dict[str, Any]) -> bool:
    if name == "_to_copy":
        target = torch.device(options.get("device") or "meta")
        return arguments[0].is_cuda and target.type == "cpu" and not options.get("non_blocking")
    if name == "copy_":
        return arguments[1].is_cuda and arguments[0].device.type == "cpu" and not (len(arguments) > 2 and arguments[2])
    return False
