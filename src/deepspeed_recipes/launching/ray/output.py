"""The files in the run folder through which an attempt's ranks pass their output and failures to the launcher."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from ...recipe.run_folder import RunFolder

POLL = 0.2
"""Seconds between two reads of the ranks' output."""


def of_rank(run: RunFolder, rank: int | str) -> Path:
    """Return the file of a rank's output, including that of native libraries."""
    return run.ranks / f"rank-{rank}.output"


def failures(run: RunFolder) -> Path:
    """Return the file that lists the failed ranks and nodes of the last attempt."""
    return run.ranks / "failed.json"


@contextlib.contextmanager
def followed(run: RunFolder) -> Iterator[None]:
    """Print the ranks' output line by line during a `with` block."""
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
    """Print a file's complete lines from a position on, or all of the rest, and return the new position."""
    with file.open("rb") as text:
        text.seek(start)
        new = text.read()
    if not all_of_it:
        new = new[: new.rfind(b"\n") + 1]
    sys.stdout.write(new.decode(errors="replace") + ("" if new.endswith(b"\n") or not new else "\n"))
    sys.stdout.flush()
    return start + len(new)
