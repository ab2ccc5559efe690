"""Times the steps of a benchmark run without synchronising the device, and counts where Python waits for it."""

import json
import os
import resource
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..recipe.gpus import GIB

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


class Clock:
    """Times the steps after a warm-up, counts the device reads of one more step, and ends the process.

    On a GPU it uses CUDA events, so that measuring does not synchronise.
    """

    def __init__(self, result: Path, warm_up: int, steps: int, facts: dict[str, Any]) -> None:
        """`facts`: written to `result` with the numbers."""
        self.result, self.warm_up, self.steps, self.facts = result, warm_up, steps, facts
        self.on_gpu = torch.cuda.is_available()
        self.marks: list[Any] = []
        self.done = 0
        self.reads = Reads()

    def step(self, loss: Callable[[], float | None] = lambda: None) -> None:
        """Mark the end of a step; `loss` reads the last loss. The last call does not return."""
        self.done += 1
        if self.done == self.warm_up and self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        if self.warm_up <= self.done <= self.warm_up + self.steps:
            self.marks.append(self._mark())
        if self.done == self.warm_up + self.steps:
            self.reads.__enter__()
        if self.done == self.warm_up + self.steps + 1:
            self.reads.__exit__(None, None, None)
            self._write(loss())

    def _mark(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _write(self, loss: float | None) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()
            seconds = [a.elapsed_time(b) / 1000 for a, b in zip(self.marks, self.marks[1:], strict=False)]
            memory = {
                "peak_allocated_gib": torch.cuda.max_memory_allocated() / GIB,
                "peak_reserved_gib": torch.cuda.max_memory_reserved() / GIB,
            }
        else:
            seconds = [b - a for a, b in zip(self.marks, self.marks[1:], strict=False)]
            memory = {}
        step = statistics.median(seconds)
        numbers = {
            "step_seconds": seconds,
            "tokens_per_second": self.facts["tokens_per_step"] / step,
            "flops_per_second": self.facts["flops_per_step"] / step,
            "host_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB,
            "reads_per_step": self.reads.total,
            "loss": loss,
        }
        self.result.write_text(json.dumps({**self.facts, **numbers, **memory}))
        os._exit(0)  # skip the rest of the run, such as the export
