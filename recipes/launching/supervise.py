"""The ranks' processes: started through the DeepSpeed launcher, told to stop, watched, and never left behind."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.launching import causes
from recipes.launching.causes import Fallen
from recipes.spec.run_folder import RunFolder

RANK_MODULE = "recipes.training.run"
LAST_GRACE = 12
"""Seconds that ranks get to end after a second Ctrl-C, after another rank has died, or when the DeepSpeed launcher is
gone: the last two of them one after the other stay below 30, which is what DeepSpeed's launcher takes per rank."""
POLL = 0.5
"""Seconds between two looks at whether the DeepSpeed launcher is still there; a rank's death is noticed at once."""


@dataclass(frozen=True)
class Ended:
    """How an attempt ended."""

    status: int
    """Exit status; 128 + the signal where one ended it."""
    cause: str | None
    """Why, in lines to show; None where there is nothing to tell: it went well, was stopped, or has told already."""
    asked: bool
    """Whether somebody has stopped it."""


def supervise(
    command: list[str],
    environment: dict[str, str],
    run: RunFolder,
    ranks: int,
    tell: Callable[[int, int], None] | None = None,
) -> Ended:
    """Run the command in a session of its own and say how it ended; nothing of it outlives this call.

    SIGINT and SIGTERM go to the ranks, which write a checkpoint and end; a second one ends them at once. When one of
    the `ranks` on this machine dies, the others get `LAST_GRACE` seconds. `tell(launcher, number)` takes the signal to
    ranks that do not run on this machine.
    """
    causes.forget_stacks(run)
    launcher = subprocess.Popen(command, env=environment, start_new_session=True)
    asked = 0

    def forward(number: int, frame: Any) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            print("\nstopping: the ranks write a checkpoint first (again to end at once)", flush=True)
            (tell or signal_ranks)(launcher.pid, number)
        else:
            os.killpg(launcher.pid, signal.SIGKILL)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        fallen, status = watch(launcher, ranks)
    finally:
        end_session(launcher.pid)
        for number, handler in previous.items():
            signal.signal(number, handler)
    cause = None if asked else causes.tell(run, fallen, status, ranks)
    return Ended(status, cause, bool(asked))


def watch(launcher: subprocess.Popen, expected: int) -> tuple[list[Fallen], int]:
    """Wait for the launcher; return the ranks of this machine that died, the first one first, and the exit status."""
    found: dict[int, tuple[int, int]] = {}  # by a descriptor that tells of the process' end: its id and its rank
    fallen: list[Fallen] = []
    poll = select.poll()
    deadline = next_look = 0.0
    while launcher.poll() is None:
        now = time.monotonic()
        if len(found) < expected and now >= next_look:
            next_look = now + 2 * POLL
            for pid, rank in find(launcher.pid, {pid for pid, _ in found.values()}):
                with contextlib.suppress(ProcessLookupError):
                    descriptor = os.pidfd_open(pid)
                    found[descriptor] = (pid, rank)
                    poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(1000 * POLL):
            poll.unregister(descriptor)
            pid, rank = found[descriptor]
            code = exit_code(pid)
            if code != 0:
                fallen.append(Fallen(rank, code, socket.gethostname()))
                deadline = deadline or time.monotonic() + LAST_GRACE
        if deadline and time.monotonic() > deadline:
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
    for descriptor in found:
        os.close(descriptor)
    if launcher.returncode < 0 and fallen and fallen[0].code:
        return fallen, shell_status(fallen[0].code)  # it was us who ended the launcher
    return fallen, shell_status(launcher.returncode)


def shell_status(code: int) -> int:
    """Return the exit status that a shell shows for one that may be the negative of a signal."""
    return code if code >= 0 else 128 - code


def find(launcher: int, known: set[int]) -> list[tuple[int, int]]:
    """Return the process and the number of every rank below the launcher that is not known yet."""
    import psutil

    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(launcher).children(recursive=True):
            if process.pid not in known and is_rank(process):
                with contextlib.suppress(psutil.Error, KeyError):
                    found.append((process.pid, int(process.environ()["RANK"])))
    return found


def exit_code(pid: int) -> int | None:
    """Return the exit code of a process that has just ended: negative for a signal, None where its parent was faster.

    Only a parent may wait for it, and that is DeepSpeed's launcher; but until the parent does, /proc tells.
    """
    try:
        status = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[-1])
    except (OSError, ValueError, IndexError):
        return None
    return os.waitstatus_to_exitcode(status)


def signal_ranks(launcher: int, number: int) -> None:
    """Send a signal to the ranks, and to the launchers above them only when no rank runs yet."""
    import psutil

    tree = psutil.Process(launcher).children(recursive=True)
    ranks = [process for process in tree if is_rank(process)]
    for process in ranks or [psutil.Process(launcher), *tree]:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended by itself
            process.send_signal(number)


def is_rank(process: Any) -> bool:
    """Return whether a process is one of the run's ranks, and not a launcher that has their command in its own."""
    import psutil

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
