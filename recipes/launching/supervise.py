"""The ranks' processes: started through the DeepSpeed launcher, told to stop, and never left behind."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

RANK_MODULE = "recipes.training.run"
LAST_GRACE = 15
"""Seconds that ranks get to end after a second Ctrl-C, or after the DeepSpeed launcher is gone."""


def supervise(command: list[str], environment: dict[str, str], tell: Callable[[int, int], None] | None = None) -> int:
    """Run the command in a session of its own and return its exit status; nothing of it outlives this call.

    SIGINT and SIGTERM go to the ranks, which write a checkpoint and end; a second one ends them at once.
    `tell(launcher, number)` takes the signal to ranks that do not run on this machine.
    """
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
        status = launcher.wait()
    finally:
        end_session(launcher.pid)
        for number, handler in previous.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status


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
