"""Counts how often a run reads a number from the device, with and without the guard; executed on every rank."""

import os
from pathlib import Path

from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_recipes.recipe.run_folder import write_json
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training.callbacks import loss_guard


class Reads(TorchDispatchMode):
    """Counts what `item()`, `bool()` and `float()` come down to."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.count += function._schema.name == "aten::_local_scalar_dense"
        return function(*arguments, **named or {})


def count_reads(folder: str, mode: str) -> None:
    """Train `with` or `without` the guard, or with one that is `curious` about every loss."""
    if mode == "without":
        training_run.LossGuard = Unguarded
    elif mode == "curious":
        loss_guard.LossGuard.on_step_end = lambda self, *_, **__: print(self.seen[-1].loss.item())
    with Reads() as reads:
        training_run.main(folder)
    if os.environ["RANK"] == "0":
        write_json(Path(folder, "reads.json"), reads.count)


class Unguarded(loss_guard.TrainerCallback):
    def __init__(self, *_):
        pass

    def watch(self, engine):
        loss_guard.damaged(engine.module)  # reads once, before the first step

    def keep(self, step, numbers, loss):
        return loss
