"""What a rank printed, kept in a file of its own: the last lines of the rank that died say why it did."""

import contextlib
import faulthandler
import os
import sys
from typing import Any, TextIO

from ..spec.run_folder import RunFolder


def keep(run: RunFolder) -> None:
    """Write what this rank prints from Python into its log too, and its stack where it crashes.

    Not what libraries print past Python: a pipe would hold it back, and lose it where the process is killed.
    """
    run.ranks.mkdir(parents=True, exist_ok=True)
    name = os.environ.get("RANK", f"of-process-{os.getpid()}")  # under mpirun it is not known before the ranks have met
    log = (run.ranks / f"rank-{name}.log").open("a", encoding="utf-8", errors="replace", buffering=1)
    sys.stdout, sys.stderr = Tee(sys.stdout, log), Tee(sys.stderr, log)
    faulthandler.enable(log)


class Tee:
    """A stream that writes into a log as well."""

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self.stream = stream
        self.log = log

    def write(self, text: str) -> int:
        """Write `text`; a progress bar, which overwrites itself, does not go into the log."""
        if not text.startswith("\r"):
            with contextlib.suppress(OSError):  # a full disk is no reason to lose the run
                self.log.write(text)
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
