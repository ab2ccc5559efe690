"""Reliable checkpoints: disk and memory are checked before each, and each is marked once it is complete."""

from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState

from ...machine.capacity import check_disk, check_memory
from ...spec.errors import UserError
from ...spec.run_folder import COMPLETE, RunFolder, read_recipe, sizes, write_json
from .. import distributed


class Checkpoints(TrainerCallback):
    """Checks disk and memory before each save, and marks a checkpoint as complete once every rank has saved."""

    def __init__(self, run: RunFolder, needed: int, gathered: int) -> None:
        """`needed`: bytes that one checkpoint takes; `gathered`: bytes of host memory that rank 0 writes it from."""
        self.run = run
        self.needed = needed
        self.gathered = gathered

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Refuse to start if a checkpoint could not be saved."""
        if control.should_save or args.save_strategy != "no":
            self._check_space()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stop, with the last checkpoint untouched, if the next would not fit."""
        if control.should_save:
            self._check_space()

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Mark the checkpoint as complete."""
        dist.barrier()
        if distributed.is_first():
            folder = self.run.checkpoints / f"checkpoint-{state.global_step}"
            layout = asdict(read_recipe(self.run).layout)
            complete = {"step": state.global_step, "world_size": dist.get_world_size(), "layout": layout}
            complete["files"] = sizes(folder)
            write_json(folder / COMPLETE, complete)

    def _check_space(self) -> None:
        message = ""
        if distributed.is_first():
            try:
                check_disk(self.run.checkpoints, self.needed, "a checkpoint")
                check_memory(self.gathered, "a checkpoint")
            except UserError as error:
                message = str(error)
        # Every rank has to stop, or the others would wait for rank 0 in the next collective.
        if distributed.total(float(bool(message)))[0]:
            raise UserError(message)
