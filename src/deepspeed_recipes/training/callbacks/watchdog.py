"""Ends a run that hangs, and records the stack of each rank."""

import faulthandler
import os
from typing import Any

from transformers import TrainerCallback

from ...recipe.run_folder import RunFolder


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

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the timer."""
        if self.seconds:
            self.run.ranks.mkdir(parents=True, exist_ok=True)
            self.file = (self.run.ranks / f"rank-{os.environ['RANK']}.stack").open("w")
            self._wait()

    def _wait(self, *_: Any, **__: Any) -> None:
        if self.file:
            faulthandler.dump_traceback_later(self.seconds, exit=True, file=self.file)

    on_step_end = on_save = _wait

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Stop the timer."""
        faulthandler.cancel_dump_traceback_later()
        if self.file:
            self.file.close()
            self.file = None

    def write_stack(self) -> None:
        """Write this rank's stack, since another rank has died."""
        if self.file:
            faulthandler.dump_traceback(self.file)
