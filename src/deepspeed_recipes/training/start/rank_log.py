"""Keeps each rank's output in a log of its own: the last lines of a rank that died show why."""

import contextlib
import faulthandler
import os
import sys
from typing import Any, TextIO

from ...recipe.errors import redact
from ...recipe.run_folder import RunFolder


def keep(run: RunFolder) -> None:
    """Copy this rank's output from Python to its log, and its stack if it crashes.

    Output of native libraries is not copied: a pipe would buffer it, and lose it when the process is killed.
    """
    run.ranks.mkdir(parents=True, exist_ok=True)
    log = (run.ranks / f"rank-{os.environ['RANK']}.log").open("a", encoding="utf-8", errors="replace", buffering=1)
    sys.stdout, sys.stderr = Tee(sys.stdout, log), Tee(sys.stderr, log)
    faulthandler.enable(log)


class Tee:
    """A stream that also writes to a log."""

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self.stream = stream
        self.log = log

    def write(self, text: str) -> int:
        """Write `text`; a progress bar, which overwrites itself, does not go into the log."""
        if not text.startswith("\r"):
            with contextlib.suppress(OSError):  # a full disk must not end the run
                self.log.write(redact(text))
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
