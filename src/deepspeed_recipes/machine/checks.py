"""The result of a check of `ds-recipes doctor`, and a runner for the commands that checks use."""

import subprocess
from dataclasses import asdict, dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """The result of one check: a line of the doctor's table."""

    name: str
    state: Literal["ok", "warning", "error", "unknown"]
    """`error` stops every run; `warning` stops or slows down some runs."""
    found: str
    fix: str = ""

    def as_json(self) -> dict:
        """Return the line as data."""
        return asdict(self)


def output(*command: str, timeout: float = 20) -> str | None:
    """Return a command's output, or None if the command is missing, fails, or takes too long."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()
