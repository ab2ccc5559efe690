"""What a check says."""

import subprocess
from dataclasses import asdict, dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    name: str
    state: Literal["ok", "warning", "error", "unknown"]
    """`error` would stop a run, `warning` would stop or slow down some runs."""
    found: str
    fix: str = ""

    def as_json(self) -> dict:
        """Return the line as data."""
        return asdict(self)


def output(*command: str, timeout: float = 20) -> str | None:
    """Return what a command prints, or None when it is missing, fails, or takes too long."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()
