"""A run that stops in an orderly way when it gets a signal."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import psutil
import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState

from ..console import say


class StopOnSignal(TrainerCallback):
    """SIGTERM or SIGINT during training: all ranks finish the step, write a checkpoint and end the run.

    The signal is read by a thread, because the main thread may be waiting in a collective, where Python's
    handlers do not run. When another rank of this machine has died there is nothing to save together: then the
    process ends at once.
    """

    def __init__(self, on_loss: Callable[[], None]) -> None:
        """`on_loss` is called when another rank has died, before this one ends."""
        self.on_loss = on_loss
        self.asked = False
        self.stopped = False
        self.group: Any = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Listen, from here on."""
        # gloo also where the rest is NCCL: asking must not wait for the GPU.
        self.group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._listen, args=(reader,), daemon=True).start()

    def _listen(self, reader: int) -> None:
        while os.read(reader, 1):
            if _live_siblings() < int(os.environ.get("LOCAL_SIZE", "1")):
                self.on_loss()
                os._exit(128 + signal.SIGTERM)
            self.asked = True

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        """Agree with the other ranks on whether this was the last step."""
        asked = torch.tensor([self.asked], dtype=torch.int32)
        if self.group is not None:
            dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=self.group)
        # Through numpy: it lies in host memory, where nothing has to be waited for.
        if asked.numpy()[0] and state.global_step < state.max_steps:
            self.stopped = True
            control.should_save = control.should_training_stop = True
            say(f"asked to stop: writing a checkpoint after step {state.global_step}")
        return control

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Let a signal end the process again; one that has stopped the run may still be on its way to this host."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN if self.stopped else signal.SIG_DFL)


def _live_siblings() -> int:
    """Return how many ranks of this machine are alive: the children of the DeepSpeed launcher, ourselves included."""
    try:
        children = psutil.Process(os.getppid()).children()
        return sum(child.status() != psutil.STATUS_ZOMBIE for child in children)
    except psutil.NoSuchProcess:
        return 0
