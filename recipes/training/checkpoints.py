"""Checkpoints that can be trusted, and a run that stops in an orderly way when it is told to."""

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState

from recipes.spec.errors import UserError
from recipes.spec.run_folder import COMPLETE, RunFolder, read_recipe, sizes, write_json
from recipes.training import world
from recipes.training.console import say
from recipes.training.preflight import check_disk, check_memory
from recipes.training.universal import MARKER


class Checkpoints(TrainerCallback):
    """Checks for room before each save, and marks a checkpoint as whole once every rank has written its part."""

    def __init__(self, run: RunFolder, needed: int, gathered: int) -> None:
        """`needed`: bytes that one checkpoint takes; `gathered`: bytes of host memory that rank 0 writes it from."""
        self.run = run
        self.needed = needed
        self.gathered = gathered

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Refuse to start what could not be saved."""
        if control.should_save or args.save_strategy != "no":
            self._check_room()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stop, with the last checkpoint untouched, where the next would not fit."""
        if control.should_save:
            self._check_room()

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Mark the checkpoint as whole."""
        dist.barrier()
        if world.is_first():
            folder = self.run.checkpoints / f"checkpoint-{state.global_step}"
            layout = asdict(read_recipe(self.run).layout)
            complete = {"step": state.global_step, "world_size": dist.get_world_size(), "layout": layout}
            complete["files"] = sizes(folder)
            write_json(folder / COMPLETE, complete)

    def _check_room(self) -> None:
        message = ""
        if world.is_first():
            try:
                check_disk(self.run.checkpoints, self.needed, "a checkpoint")
                check_memory(self.gathered, "a checkpoint")
            except UserError as error:
                message = str(error)
        # Every rank has to stop, or the others would wait for rank 0 in the next collective.
        if world.total(float(bool(message)))[0]:
            raise UserError(message)


def restore_groups(engine: Any, checkpoint: Path) -> None:
    """Under ZeRO-3, mend what DeepSpeed does to the optimizer when it loads a universal checkpoint.

    DeepSpeed 0.19.8, stage3.py, `load_hp_checkpoint_state_from_checkpoint_dir_stage3`: every group of parameters gets
    the first one's hyper-parameters, so norms and biases are decayed from there on, and all states share one tensor
    that counts the steps, which each of them advances. `test_zero3_forgets_the_groups_of_a_universal_checkpoint` tells
    when this can go.
    """
    if not (engine.load_universal_checkpoint() and engine.zero_optimization_partition_weights()):
        return
    folder = checkpoint / (checkpoint / MARKER).read_text(encoding="utf-8").strip()
    # Mapped, not read: one rank's share of the states stands in the same file. DeepSpeed unpickles it too.
    saved = torch.load(folder / "zero" / "optimizer_state.pt", mmap=True, weights_only=False)
    optimizer = engine.optimizer.optimizer
    for group, own in zip(optimizer.param_groups, saved["optimizer_state_dict"]["param_groups"], strict=True):
        group.update({key: value for key, value in own.items() if key != "params"})
    for state in optimizer.state.values():
        if torch.is_tensor(state["step"]):
            state["step"] = state["step"].clone()


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
