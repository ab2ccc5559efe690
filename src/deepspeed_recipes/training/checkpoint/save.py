"""Reliable checkpoints: disk and memory are checked before each, and each is marked once it is complete.

Checkpoints are pickles and could run code; only tensors and plain values are loaded from them. DeepSpeed 0.19.8 reads
every file with `torch.load(weights_only=False)`; a variable of torch overrules that.
"""

import contextlib
import os
import pickle
import re
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ...machine import run_lock
from ...machine.system import check_disk, check_memory
from ...recipe.errors import FileUnusable, UserError, first_line, of_system
from ...recipe.files import Json
from ...recipe.recipe import Recipe
from ...recipe.run_folder import (
    COMPLETE,
    RunFolder,
    best_checkpoint,
    checkpoints,
    complete_checkpoints,
    remove_checkpoint,
    sizes,
    write_json,
)
from .. import distributed
from ..console import say
from . import digests

STORED = (ZeroStageEnum, LossScaler, DynamicLossScaler, fragment_address)
"""Classes that DeepSpeed stores in addition to tensors and plain values; all of them hold only numbers."""


def load_only_data() -> None:
    """Make every `torch.load` of this process and its children refuse everything except data."""
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    torch.serialization.add_safe_globals(list(STORED))


@contextlib.contextmanager
def refusing_code(checkpoint: Path | None) -> Iterator[None]:
    """Within a `with` block, explain why `checkpoint` was not loaded: it contains something that is not data."""
    try:
        yield
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = found[1] if found else first_line(error)
        raise UserError(
            f"{checkpoint}: not loaded: one of its files contains {what}, which is code rather than data; "
            f"delete the folder, or start a new run from its weights: without --resume, with model.path={checkpoint}."
        ) from error


class Checkpoints(TrainerCallback):
    """Checks disk and memory before each save, and marks a checkpoint as complete once every rank has saved."""

    def __init__(self, recipe: Recipe, run: RunFolder, mark: Json, needed: int, gathered: int) -> None:
        """Store the requirements of each save: a checkpoint's size and rank 0's host memory to write it, in bytes.

        Each checkpoint records the run's fingerprint, `mark`.
        """
        self.recipe = recipe
        self.run = run
        self.mark = mark
        self.needed = needed
        self.gathered = gathered
        self.lock = run_lock.found(run.path)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Refuse to start if a checkpoint could not be saved; a run that is only exported again saves none."""
        if state.global_step < state.max_steps and (control.should_save or args.save_strategy != "no"):
            distributed.check_on_first(self._check_space)

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Stop, with the last checkpoint untouched, if the next would not fit, or if another writer has taken over."""
        if distributed.is_first() and (control.should_log or control.should_evaluate or control.should_save):
            self.lock.check()
        if control.should_save:
            distributed.check_on_first(self._check_space)

    def on_evaluate(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Check the space before an evaluation that may save."""
        if self.recipe.picks:
            distributed.check_on_first(self._check_space)

    def on_save(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Mark the checkpoint as complete once all of it is on the disk; each rank reads a share of the files."""
        dist.barrier()
        folder = self.run.checkpoints / f"checkpoint-{state.global_step}"
        written = distributed.of_first(lambda: sizes(folder))
        share = [folder / name for name in sorted(written)[dist.get_rank() :: dist.get_world_size()]]
        digests.flush(share)
        shares = distributed.of_all({str(path.relative_to(folder)): digests.of_file(path) for path in share})
        if distributed.is_first():
            layout = asdict(self.recipe.layout)
            complete = {"step": state.global_step, "world_size": dist.get_world_size(), "layout": layout}
            complete["fingerprint"] = self.mark
            complete |= {"files": written, "digests": {key: share[key] for share in shares for key in sorted(share)}}
            folders = [path for path in folder.rglob("*") if path.is_dir()]
            digests.flush([*folders, folder, self.run.checkpoints])
            self.lock.check()
            write_json(folder / COMPLETE, complete)
            digests.flush([folder])
            self._remove_old()

    def _remove_old(self) -> None:
        """Remove all but the newest complete checkpoints and the best; leave everything that the run has not written.

        The Trainer would remove by age, before the new checkpoint is complete, also links and `checkpoint-9-backup`.
        """
        try:
            own = [one for one in checkpoints(self.run) if not one.is_symlink()]
            complete = (one for one in complete_checkpoints(self.run) if one in own)
            kept, keep = list(islice(complete, self.recipe.keep_checkpoints)), self.recipe.keep_checkpoints
            best = best_checkpoint(self.run, self.recipe) if self.recipe.keep_best else None
            for old in own[own.index(kept[-1]) + 1 :] if len(kept) == keep else ():
                if old != best:
                    remove_checkpoint(old)
        except (OSError, FileUnusable) as error:
            reason = of_system(error) if isinstance(error, OSError) else first_line(error)
            say(f"an older checkpoint cannot be removed: {reason}")

    def _check_space(self) -> None:
        check_disk(self.run.checkpoints, self.needed, "a checkpoint")
        check_memory(self.gathered, "a checkpoint")
