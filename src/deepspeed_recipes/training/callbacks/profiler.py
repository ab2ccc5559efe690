"""Records some steps with torch.profiler, or marks them for Nsight Systems; without `--profile` it does nothing.

`src/deepspeed_recipes/report/profiler` reads the trace after the run.
"""

import contextlib
import gzip
import json
import os
import shutil
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules import module as hooks
from transformers import TrainerCallback, TrainerControl, TrainerState

from ...recipe.errors import first_line
from ...recipe.files import Json
from ...recipe.recipe import Recipe
from ...recipe.run_folder import RunFolder, write_json
from ...report.profiler import window
from ...report.profiler.trace import MODULE, OTHERS, RECORD, STEP, SUFFIX
from .. import distributed
from ..console import say
from ..model.load import parameter_counts

WARMUP = 2
"""Steps that are excluded from comparisons: ZeRO-3 learns its order of fetches in step 1, step 2 makes buffers."""


class Phases:
    """Phases of a step in a run that records nothing."""

    def begin(self, step: int) -> None:
        """Begin a step."""

    def phase(self, name: str) -> contextlib.AbstractContextManager:
        """Return a context for a phase of a step: `data`, `forward`, `backward` or `step`."""
        return contextlib.nullcontext()


class Profiler(Phases, TrainerCallback):
    """Times every step, and records the requested ones.

    The time of a step runs from the fetch of its batches to its update, without evaluations, logs and checkpoints.
    """

    def __init__(self, recipe: Recipe, run: RunFolder, about: Json, leave_out: Callable[[float], None]) -> None:
        """Record the steps that `recipe.profile` selects.

        `about` are facts about the run that the verdict needs (`RankTrace.about`). `leave_out` is called with the
        seconds in which the run waited for its profiler.
        """
        self.settings = recipe.profile
        self.names_modules = recipe.compile == "off"  # a range in a compiled layer would break its graph
        self.folder = run.profile
        self.about = about
        self.leave_out = leave_out
        self.first = self.last = 0
        self.steps: list[dict[str, float]] = []
        self.others: list[float] = []
        self.collectives: list[Json] = []
        self.recording: contextlib.ExitStack | None = None
        self.profile: torch.profiler.profile | None = None
        self.written: Path | None = None
        self.span: Any = None
        self.now: dict[str, float] = {}
        self.model: torch.nn.Module | None = None

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Choose the steps to record, once their number is known."""
        self.first, self.last = window.parse(self.settings.steps or window.AUTO, state.max_steps)
        self.model = kwargs.get("model")

    def begin(self, step: int) -> None:
        """Begin a step, and start recording before the first step to record."""
        if step == self.first:
            start = time.perf_counter()
            asked = self.settings.ranks  # chosen by the launcher; a restart may have fewer
            if asked in ("all", window.AUTO) or dist.get_rank() in map(int, asked.split(",")):
                self._start()
            dist.barrier()  # ranks take unequally long to start: the first step would wait for the slowest
            self.leave_out(time.perf_counter() - start)
        self.now = {"step": step, "data_seconds": 0.0, "data_cpu_seconds": 0.0}
        if self.recording:
            self.span = self._range(f"{STEP}{step}")
            self.span.__enter__()
        self.now |= {"cpu": time.thread_time(), "wall": time.perf_counter()}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Surround a phase with a range of its name."""
        if not self.recording:
            yield
            return
        cpu, wall = time.thread_time(), time.perf_counter()
        with self._range(STEP + name):
            yield
        if name == "data":
            self.now["data_seconds"] += time.perf_counter() - wall
            self.now["data_cpu_seconds"] += time.thread_time() - cpu

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Record the step's times; after the last profiled step, write the trace."""
        if self.recording and state.global_step == self.last and distributed.on_gpu():
            torch.cuda.synchronize()  # so that the last step's kernels are recorded
        cpu, begun = time.thread_time() - self.now.pop("cpu"), self.now.pop("wall")
        wall = time.perf_counter() - begun
        if self.recording:
            self.span.__exit__(None, None, None)
            self.steps.append(self.now | {"seconds": wall, "cpu_seconds": cpu})
            if not distributed.on_gpu() and not self.settings.nsys:
                # A trace does not contain the process group of gloo's collectives. PyTorch's flight recorder keeps the
                # latest 2,000.
                since = self.collectives[-1]["ns"] if self.collectives else 0
                self.collectives += [
                    {
                        "name": one["profiling_name"],
                        "ns": one["time_created_ns"],
                        "group": one["process_group"][0],
                        "dtype": (one["input_dtypes"] or [""])[0],
                    }
                    for one in json.loads(torch._C._distributed_c10d._dump_fr_trace_json())["entries"]
                    if one["time_created_ns"] > since
                ]
        elif state.global_step > WARMUP and not self.first <= state.global_step <= self.last:
            self.others.append(wall)
        if state.global_step == self.last:
            if self.recording:
                self._stop()
            dist.barrier()  # ranks take unequally long to write their traces
            self.leave_out(time.perf_counter() - wall - begun)

    def on_train_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Write the times of the steps that were not recorded, for comparison with the recorded steps."""
        if self.recording:  # the run stopped before the last step to record
            self._stop()
        if self.written:
            others = {"count": len(self.others), "median": statistics.median(self.others or [0.0])}
            write_json(self.written.with_name(self.written.name.removesuffix(SUFFIX) + OTHERS), others)

    # torch.profiler, or the profiler that watches the process

    def _start(self) -> None:
        self.recording = contextlib.ExitStack()
        if distributed.on_gpu():
            torch.cuda.synchronize()
        if self.settings.nsys:
            torch.cuda.profiler.start()
            self.recording.callback(torch.cuda.profiler.stop)
            return
        if distributed.on_gpu():
            torch.cuda.memory._record_memory_history(max_entries=100_000)
        self.profile = torch.profiler.profile(record_shapes=True)
        if self.names_modules:  # surround each module's forward pass with a range of its name
            names = {one: name for name, one in self.model.named_modules()} if self.model is not None else {}
            entered: list[torch.profiler.record_function] = []

            def enter(module: torch.nn.Module, inputs: object) -> None:
                if not torch.compiler.is_compiling():
                    name = names.get(module) or type(module).__name__
                    entered.append(torch.profiler.record_function(MODULE + name))
                    entered[-1].__enter__()

            def leave(module: torch.nn.Module, inputs: object, output: object) -> None:
                if entered and not torch.compiler.is_compiling():
                    entered.pop().__exit__(None, None, None)

            self.recording.callback(hooks.register_module_forward_pre_hook(enter).remove)
            self.recording.callback(hooks.register_module_forward_hook(leave, always_call=True).remove)
        self.recording.enter_context(self.profile)

    def _range(self, name: str) -> contextlib.AbstractContextManager:
        if self.settings.nsys:
            return torch.cuda.nvtx.range(name.removeprefix(STEP))
        return torch.profiler.record_function(name)

    def _stop(self) -> None:
        assert self.recording
        self.recording.close()
        self.recording = None
        if self.profile is None:
            return
        try:
            self._write(self.profile)
        except Exception as error:  # a full disk, for example: the run is worth more than its trace
            say(f"rank {dist.get_rank()}: the trace could not be written: {type(error).__name__}: {first_line(error)}")
        self.profile = None

    def _write(self, profile: torch.profiler.profile) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if distributed.on_gpu():
            torch.cuda.memory._dump_snapshot(str(self.folder / f"rank-{dist.get_rank()}.memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        path = self.folder / f"rank-{dist.get_rank()}{SUFFIX}"
        total, trained = parameter_counts(self.model) if self.model is not None else (0, 0)
        written = self.about | {
            "held": {"total": total, "trained": trained},
            "rank": dist.get_rank(),
            "host": socket.gethostname(),
            "world_size": dist.get_world_size(),
            "steps": self.steps,
            "collectives": self.collectives,
        }
        # torch would write to the temporary folder; the free space of the run folder has been checked.
        raw, draft = path.with_name(f"{path.name}.raw"), path.with_name(f"{path.name}.part")
        try:
            profile.export_chrome_trace(str(raw))
            with raw.open("rb") as file, gzip.open(draft, "wb", compresslevel=4) as packed:
                head = file.readline()
                assert head.strip() == b"{", head
                packed.write(f'{{"{RECORD}": {json.dumps(written)},'.encode())
                shutil.copyfileobj(file, packed)
            os.replace(draft, path)
        finally:
            raw.unlink(missing_ok=True)
            draft.unlink(missing_ok=True)
        self.written = path
