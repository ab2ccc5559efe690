"""Writes system.jsonl: the load of each rank's GPU and of each node, sampled by a separate thread.

Each rank samples its GPU, and the first rank of a node also the node. Rank 0 writes `system.jsonl` itself and the
others write files in `ranks/`, since nodes cannot append to one file over a network; rank 0 joins them when training
ends.
"""

import os
import socket
import threading
import time

import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState

from ...machine.readings import Gpu, Host
from ...recipe.errors import first_line
from ...recipe.run_folder import RunFolder, append_jsonl, read_jsonl, write_jsonl
from ..console import say

SECONDS = 5.0
"""Between samples."""
MOST = 1000
"""Samples after which the interval grows to a thousandth of the run: a day then has 4,000 samples, not 17,000."""


class SystemLog(TrainerCallback):
    """Samples in a thread that never affects the training: it takes no lock, uses no tensor, and raises no error."""

    def __init__(self, run: RunFolder, gpu: str | None) -> None:
        """Sample nothing yet; `gpu` is the UUID of this rank's GPU, or None if NVML does not list one."""
        self.run = run
        self.uuid = gpu
        self.rank = dist.get_rank()
        self.path = run.system if self.rank == 0 else run.system_of(self.rank)
        self.place = {"node": socket.gethostname(), "rank": self.rank}
        self.step = 0
        self.gpu: Gpu | None = None
        self.host: Host | None = None
        self.said = False
        self.loads: list[float] = []
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._sample, name="system-log", daemon=True)

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Start sampling, on ranks that have anything to sample."""
        self.step = state.global_step
        if self.uuid:
            try:
                self.gpu = Gpu(self.uuid)
            except ImportError:
                say("system.jsonl has no load, power and temperature of the GPUs; for these: pip install nvidia-ml-py")
            except Exception as error:
                self._say(error)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            self.host = Host()
        if self.gpu or self.host:
            self.thread.start()

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Store the step, for the samples after it."""
        self.step = state.global_step

    def on_train_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Take a last sample, and join the files of all ranks; a collective."""
        self.ended.set()
        if self.thread.is_alive():
            self.thread.join(2 * SECONDS)  # a read that hangs in the driver must not delay the export
        dist.barrier()
        if self.rank == 0:
            join(self.run)

    def utilization(self) -> dict[str, float]:
        """Return `gpu_utilization`, the mean of the samples since the last call, in percent; empty without samples."""
        loads, self.loads = self.loads, []
        return {"gpu_utilization": sum(loads) / len(loads)} if loads else {}

    def _sample(self) -> None:
        start, ended = time.monotonic(), False
        try:
            while not ended:  # the last sample is taken after the end
                ended = self.ended.wait(max(SECONDS, (time.monotonic() - start) / MOST))
                found: dict[str, float] = self.host.read() if self.host else {}
                if self.gpu:
                    found |= self.gpu.read()
                    for error in self.gpu.errors:
                        self._say(error)
                if "gpu_utilization" in found:
                    self.loads.append(found["gpu_utilization"])
                append_jsonl(self.path, {"time": round(time.time(), 3), **self.place, "step": self.step, **found})
        except Exception as error:  # a full disk, for example: a measurement never ends a run
            self._say(error)

    def _say(self, error: Exception) -> None:
        """Print once, on whatever rank, what cannot be measured."""
        if not self.said:
            self.said = True
            about = f"{type(error).__name__}: {first_line(error)}"
            print(f"rank {self.rank}: system.jsonl is incomplete, training continues: {about}", flush=True)


def join(run: RunFolder) -> None:
    """Merge the other ranks' samples into system.jsonl, in order of time; on one rank, once all have finished."""
    parts = [part for part in run.ranks.glob(run.system_of("*").name) if part.is_file()]
    if not parts:
        return
    try:
        rows = [row for path in (run.system, *parts) for row in read_jsonl(path)]
        write_jsonl(run.system, sorted(rows, key=lambda row: row["time"]))
        for part in parts:
            part.unlink()
    except (OSError, ValueError, KeyError) as error:  # the report also reads the separate files
        say(f"{run.system}: the samples of other ranks stay in {run.ranks}: {first_line(error)}")
