"""Stops a run cleanly on a signal or by the user's callbacks, or ends one that hangs and records each rank's stack."""

import faulthandler
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import psutil
import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState

from ...recipe.run_folder import RunFolder
from ..console import say

STOPS = (signal.SIGTERM, signal.SIGINT)


class StopOnSignal(TrainerCallback):
    """Stops training on SIGTERM or SIGINT: all ranks finish the step, write a checkpoint and end the run.

    A thread reads the signal, because the main thread may be waiting in a collective, where Python's handlers do not
    run. If another rank of this machine has died, no checkpoint can be saved, and the process exits at once.
    """

    def __init__(self, on_loss: Callable[[], None]) -> None:
        """`on_loss` is called when another rank has died, before this process ends."""
        self.on_loss = on_loss
        self.asked = False
        self.stopped = False
        self.group: dist.ProcessGroup | None = None

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Start to listen for signals."""
        # gloo even where the other groups use NCCL: this group must not wait for the GPU.
        self.group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        for number in STOPS:
            signal.signal(number, lambda *_: None)
        # Ray's workers block SIGINT, and ranks inherit that.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        threading.Thread(target=self._listen, args=(reader,), daemon=True).start()

    def _listen(self, reader: int) -> None:
        while number := os.read(reader, 1):
            # Python reports every signal that has a handler: when data is read by worker processes, PyTorch handles
            # SIGCHLD, which arrives when Triton's compiler ends.
            if number[0] not in STOPS:
                continue
            try:
                # This machine's ranks have the launcher's command. On a Ray cluster each has another parent, started
                # by the node's raylet.
                launcher = psutil.Process(int(os.environ.get("RAY_RAYLET_PID", os.getppid())))
                command, below = psutil.Process().cmdline(), launcher.children(recursive=True)
                ranks = [one for one in below if one.status() != psutil.STATUS_ZOMBIE and one.cmdline() == command]
                parents = {one.pid for one in ranks}
                alive = sum(one.ppid() not in parents for one in ranks)  # a rank's forks have its command too
            except psutil.NoSuchProcess:
                alive = 0
            if alive < int(os.environ.get("LOCAL_SIZE", "1")):
                self.on_loss()
                os._exit(128 + signal.SIGTERM)
            self.asked = True

    def on_step_end(
        self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> TrainerControl:
        """Agree with the other ranks on whether this was the last step."""
        asked = torch.tensor([self.asked], dtype=torch.int32)
        if self.group is not None:
            dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=self.group)
        # Through numpy: the tensor is in host memory, so nothing waits for a device.
        if asked.numpy()[0] and state.global_step < state.max_steps:
            self.stopped = True
            control.should_save = control.should_training_stop = True
            say(f"stopping on a signal: writing a checkpoint after step {state.global_step}")
        return control

    def on_train_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Let signals end the process again, unless one has stopped the run: it may reach this host late."""
        signal.set_wakeup_fd(-1)
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN if self.stopped else signal.SIG_DFL)


class Agreement(TrainerCallback):
    """Makes what the user's callbacks ask of the Trainer on any rank happen on all ranks.

    Logging, evaluating, saving and stopping are collectives: a callback that requests one of them on rank 0 only would
    hang the run. The ranks agree wherever the Trainer reads its flags next.
    """

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Make a group that does not wait for the GPU."""
        self.group = dist.new_group(backend="gloo")

    def on_step_end(
        self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> TrainerControl:
        """Set the flags that are set on any rank."""
        asked = torch.tensor(
            [
                *(control.should_log, control.should_evaluate, control.should_save),
                *(control.should_epoch_stop, control.should_training_stop),
            ],
            dtype=torch.int32,
        )
        dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=self.group)
        log, evaluate, save, end_epoch, end_run = map(bool, asked.numpy().tolist())
        # The last step of a run is always logged.
        control.should_log, control.should_evaluate, control.should_save = log or end_run, evaluate, save
        control.should_epoch_stop, control.should_training_stop = end_epoch, end_run
        return control

    on_substep_end = on_log = on_evaluate = on_save = on_epoch_end = on_step_end


class Watchdog(TrainerCallback):
    """Writes this rank's Python stack and ends the process when no step, evaluation or save finishes in time.

    The timer is a native thread that needs no GIL, so it also ends a rank that hangs inside a library. Every rank has a
    timer, and all ranks hang together, since a step is collective.
    """

    def __init__(self, run: RunFolder, minutes: float) -> None:
        """`minutes`: 0 turns the watchdog off."""
        self.run = run
        self.seconds = 60 * minutes
        self.file: Any = None

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Start the timer."""
        if self.seconds:
            self.run.ranks.mkdir(parents=True, exist_ok=True)
            self.file = (self.run.ranks / f"rank-{os.environ['RANK']}.stack").open("w")
            self._wait()

    def _wait(self, *_: object, **__: object) -> None:
        if self.file:
            faulthandler.dump_traceback_later(self.seconds, exit=True, file=self.file)

    on_step_end = on_save = _wait

    def on_train_end(self, *_: object, **__: object) -> None:
        """Stop the timer."""
        faulthandler.cancel_dump_traceback_later()
        if self.file:
            self.file.close()
            self.file = None

    def write_stack(self) -> None:
        """Write this rank's stack, since another rank has died."""
        if self.file:
            faulthandler.dump_traceback(self.file)
