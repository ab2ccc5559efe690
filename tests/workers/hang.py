"""A rank that stops doing anything in its third step; executed on every rank."""

import ctypes
import os
import time

from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training.callbacks import loss_guard


def hang(folder: str, how: str) -> None:
    """Train, with rank 1 hanging `asleep` or inside a library that never gives Python's lock back."""
    after_step = loss_guard.LossGuard.on_step_end

    def hang_here(self, args, state, *rest, **named):
        if state.global_step == 2 and os.environ["RANK"] == "1":
            time.sleep(600) if how == "asleep" else ctypes.PyDLL(None).sleep(600)
        after_step(self, args, state, *rest, **named)

    loss_guard.LossGuard.on_step_end = hang_here
    training_run.main(folder)
