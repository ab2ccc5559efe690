"""The ranks' processes: started through the DeepSpeed launcher, told to stop, watched, and never left behind."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import psutil

from recipes.launching import causes
from recipes.launching.causes import Fallen
from recipes.launching.ranks import POLL, Watched, numbered
from recipes.spec.run_folder import RunFolder

RANK_MODULE = "recipes.training.run"
LAST_GRACE = 12
"""Seconds that ranks get to end after a second Ctrl-C, after another rank has died, or when the DeepSpeed launcher is
gone: the last two of them one after the other stay below 30, which is what DeepSpeed's launcher takes per rank."""


@dataclass(frozen=True)
class Ended:
    """How an attempt ended."""

    status: int
    """Exit status; 128 + the signal where one ended it."""
    cause: str | None
    """Why, in lines to show; None where there is nothing to tell: it went well, was stopped, or has told already."""
    asked: bool
    """Whether somebody has stopped it."""


class Place(Protocol):
    """Where a launcher's ranks run."""

    def fallen(self, seconds: float) -> list[Fallen]:
        """Wait at most that long and return the ranks that ended badly meanwhile, and the hosts that were lost."""

    def signal(self, number: int) -> None:
        """Send a signal to the ranks."""

    def close(self) -> None:
        """Stop watching."""


class Here:
    """On this machine, below the launcher."""

    def __init__(self, expected: int, launcher: int) -> None:
        """`launcher` is its process id, `expected` how many ranks there will be."""
        self.launcher = launcher
        self.watched = Watched(lambda known: find(launcher, known), expected)
        self.close = self.watched.close

    def fallen(self, seconds: float) -> list[Fallen]:
        """Wait at most that long and return the ranks that ended badly meanwhile."""
        return [Fallen(rank, code, socket.gethostname()) for rank, code in self.watched.fallen(seconds)]

    def signal(self, number: int) -> None:
        """Send a signal to the ranks, and to the launchers above them only when no rank runs yet."""
        tree = psutil.Process(self.launcher).children(recursive=True)
        ranks = [process for process in tree if is_rank(process)]
        for process in ranks or [psutil.Process(self.launcher), *tree]:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended by itself
                process.send_signal(number)


def supervise(
    command: list[str],
    environment: dict[str, str],
    run: RunFolder,
    ranks: int,
    place: Callable[[int], Place] | None = None,
) -> Ended:
    """Run the command in a session of its own and say how it ended; nothing of it outlives this call.

    SIGINT and SIGTERM go to the ranks, which write a checkpoint and end; a second one ends them at once. When one of
    the `ranks` dies, the others get `LAST_GRACE` seconds. `place(launcher)` is where the ranks run; without, here.
    """
    causes.forget_stacks(run)
    launcher = subprocess.Popen(command, env=environment, start_new_session=True)
    where = (place or partial(Here, ranks))(launcher.pid)
    asked = 0

    def forward(number: int, frame: Any) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            print("\nstopping: the ranks write a checkpoint first (again to end at once)", flush=True)
            where.signal(number)
        else:
            os.killpg(launcher.pid, signal.SIGKILL)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        fallen, status = watch(launcher, where)
    finally:
        end_session(launcher.pid)
        where.close()
        for number, handler in previous.items():
            signal.signal(number, handler)
    cause = None if asked else causes.tell(run, fallen, status, ranks)
    return Ended(status, cause, bool(asked))


def watch(launcher: subprocess.Popen, where: Place) -> tuple[list[Fallen], int]:
    """Wait for the launcher; return the ranks that died, the first one first, and the exit status."""
    fallen: list[Fallen] = []
    deadline = 0.0
    while launcher.poll() is None:
        fallen += where.fallen(POLL)
        if fallen:
            deadline = deadline or time.monotonic() + LAST_GRACE
        # Of a lost host nobody waits for last words: to notice that it is gone has taken as long.
        if deadline and (time.monotonic() > deadline or any(one.rank is None for one in fallen)):
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
    fallen += where.fallen(0)
    if launcher.returncode < 0 and fallen and fallen[0].code:
        return fallen, shell_status(fallen[0].code)  # it was us who ended the launcher
    return fallen, shell_status(launcher.returncode)


def shell_status(code: int) -> int:
    """Return the exit status that a shell shows for one that may be the negative of a signal."""
    return code if code >= 0 else 128 - code


def find(launcher: int, known: set[int]) -> list[tuple[int, int]]:
    """Return the process and the number of every rank below the launcher that is not known yet."""
    try:
        tree = psutil.Process(launcher).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return numbered(process for process in tree if process.pid not in known and is_rank(process))


def is_rank(process: psutil.Process) -> bool:
    """Return whether a process is one of the run's ranks, and not a launcher that has their command in its own."""
    try:
        command = process.cmdline()
    except psutil.NoSuchProcess:  # a zombie too
        return False
    return RANK_MODULE in command and "deepspeed.launcher.launch" not in command


def end_session(session: int) -> None:
    """Wait for what is left of a session, and end what does not end by itself."""
    deadline = time.monotonic() + LAST_GRACE
    while session_alive(session) and time.monotonic() < deadline:
        time.sleep(0.1)
    if session_alive(session):
        os.killpg(session, signal.SIGKILL)


def session_alive(session: int) -> bool:
    """Return whether a process group still has members."""
    try:
        os.killpg(session, 0)
    except ProcessLookupError:
        return False
    return True
