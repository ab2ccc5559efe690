"""Times the individual steps of a benchmark run without synchronising the device."""

import json
import os
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .device_reads import Reads

GIB = 2**30


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
