"""What the ranks of an attempt leave in the run folder for the launcher: all that they print, and which have failed."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from ...recipe.run_folder import RunFolder

POLL = 0.2
"""Seconds between two looks at what the ranks have printed."""


def of_rank(run: RunFolder, rank: int | str) -> Path:
    """Return the file of all that a rank prints, native libraries too."""
    return run.ranks / f"rank-{rank}.output"


def failures(run: RunFolder) -> Path:
    """Return the file of the ranks and nodes that have failed in the last attempt."""
    return run.ranks / "failed.json"


@contextlib.contextmanager
def followed(run: RunFolder) -> Iterator[None]:
    """Print what the ranks print, line by line, during a `with` block."""
    shown = {file: file.stat().st_size for file in run.ranks.glob(of_rank(run, "*").name)}
    ended = threading.Event()

    def follow() -> None:
        last = False
        while not last:
            last = ended.wait(POLL)
            for file in sorted(run.ranks.glob(of_rank(run, "*").name)):
                shown[file] = show(file, shown.get(file, 0), last)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def show(file: Path, start: int, all_of_it: bool) -> int:
    """Print a file's complete lines from a position on, or all of the rest, and return how far it is shown."""
    with file.open("rb") as text:
        text.seek(start)
        new = text.read()
    if not all_of_it:
        new = new[: new.rfind(b"\n") + 1]
    sys.stdout.write(new.decode(errors="replace") + ("" if new.endswith(b"\n") or not new else "\n"))
    sys.stdout.flush()
    return start + len(new)
