"""Runs DeepSpeed's launcher and its ranks: forwards signals, explains failures, and leaves no process behind."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import psutil

from ..machine import children
from ..recipe.errors import redact
from ..recipe.run_folder import REWIND, UNREADABLE, RunFolder, starting_recipe
from .ranks import POLL, RankMonitor, numbered

LAST_LINES = 8
"""Number of lines of a failed rank's log to print."""
EXPLAINED = (0, 2, REWIND, UNREADABLE)
"""Exit statuses that need no explanation: the run finished, or the ranks have printed the reason."""
HUNG = "Timeout"
"""The first word of a stack that the interpreter's watchdog writes; stacks from a crash start differently."""


@dataclass(frozen=True)
class FailedRank:
    """A rank that has failed, or a host that was lost."""

    rank: int | None
    """The rank's number, or None if the whole host stopped answering."""
    code: int | None
    """Exit code, negative for a signal, or None if unknown."""
    host: str


def explain(run: RunFolder, failed: Sequence[FailedRank], status: int, ranks: int) -> str | None:
    """Return lines that explain why the run ended with `status`, or None if the ranks have printed the reason."""
    if status in EXPLAINED:
        return None
    lost = [one.host for one in failed if one.rank is None]
    if lost:
        return f"{', '.join(lost)} stopped answering; the ranks on the other hosts were ended"
    stacks = run.ranks.glob("rank-*.stack")
    hung = {int(file.stem.partition("-")[2]) for file in stacks if file.read_text().startswith(HUNG)}
    if hung:
        missing = sorted(set(range(ranks)) - hung)
        silent = f"; none from rank {', '.join(map(str, missing))}, which was stopped or cut off" if missing else ""
        minutes = starting_recipe(run).hang_minutes
        return f"no step finished for {minutes:g} minutes; each rank's Python stack is in {run.ranks}{silent}"
    if not failed:
        return f"DeepSpeed's launcher exited with status {status}"
    first = failed[0]
    log = run.ranks / f"rank-{first.rank}.log"
    last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:] if log.exists() else []
    what = f"rank {first.rank} on {first.host} {ending(first.code, status)}"
    lines = [f"{what}; the last lines of its log:", *(f"  | {line}" for line in last)] if last else [what]
    return redact("\n".join(lines))


def ending(code: int | None, status: int) -> str:
    """Return how a process ended, as a clause."""
    if code is None:  # DeepSpeed's launcher passes on the first bad status, and a signal as 256 minus its number
        code = status - 256 if status > 192 else status
    if code >= 0:
        return f"exited with status {code}"
    return f"was killed by {signal.Signals(-code).name}"


RANK_MODULE = "deepspeed_recipes.training.run"
TOGETHER = 1
"""Seconds within which a second signal belongs to the first: `timeout` signals the process and its group."""
LAST_GRACE = 12
"""Seconds within which ranks must end after a second Ctrl-C, after another rank has failed, or after the DeepSpeed
launcher has ended. The last two can follow each other, and together take less than the 30 s that DeepSpeed's launcher
waits per rank."""


@dataclass(frozen=True)
class Outcome:
    """The result of an attempt."""

    status: int
    """Exit status; 128 plus the signal's number if a signal ended the attempt."""
    cause: str | None
    """The cause of a failure as lines to print, or None after success or a stop, or if the ranks have printed it."""
    stopped: int
    """The first signal by which the user or a scheduler has stopped the attempt, or 0."""


class RankWatcher(Protocol):
    """Watches a launcher's ranks on one or more machines."""

    def failed(self, seconds: float) -> list[FailedRank]:
        """Wait at most that long, and return the ranks that have failed and the hosts that were lost meanwhile."""

    def signal(self, number: int) -> None:
        """Send a signal to the ranks."""

    def close(self) -> None:
        """Stop watching."""


class LocalWatcher:
    """Watches the ranks that a launcher has started on this machine."""

    def __init__(self, expected: int, launcher: int) -> None:
        """`launcher` is the launcher's process id, `expected` the number of ranks."""
        self.launcher = launcher
        self.monitor = RankMonitor(lambda known: find_ranks(launcher, known), expected)
        self.close = self.monitor.close

    def failed(self, seconds: float) -> list[FailedRank]:
        """Wait at most that long, and return the ranks that have failed meanwhile."""
        return [FailedRank(rank, code, socket.gethostname()) for rank, code in self.monitor.failed(seconds)]

    def signal(self, number: int) -> None:
        """Send a signal to the ranks, or to the launchers above them while no rank runs yet."""
        tree = psutil.Process(self.launcher).children(recursive=True)
        ranks = [process for process in tree if is_rank(process)]
        for process in ranks or [psutil.Process(self.launcher), *tree]:
            with contextlib.suppress(psutil.NoSuchProcess):  # the process has just ended
                process.send_signal(number)


def supervise(
    command: list[str],
    environment: dict[str, str],
    run: RunFolder,
    ranks: int,
    watcher_of: Callable[[int], RankWatcher] | None = None,
) -> Outcome:
    """Run the command in a session of its own and return how it ended; its processes outlive neither this call nor us.

    SIGINT and SIGTERM go to the ranks, which write a checkpoint and end; a second signal ends them at once. When one of
    the `ranks` fails, the others get `LAST_GRACE` seconds. `watcher_of(launcher)` watches ranks on other machines;
    without it they run here.
    """
    for file in run.ranks.glob("rank-*.stack"):  # of an earlier attempt
        file.unlink(missing_ok=True)  # every node of a cluster removes them
    with children.running(command, env=environment) as launcher:
        watcher = (watcher_of or partial(LocalWatcher, ranks))(launcher.pid)
        signals: list[tuple[int, float]] = []

        def forward(number: int, frame: object) -> None:
            signals.append((number, time.monotonic()))
            if len(signals) == 1:
                print(
                    "\nstopping: the ranks write a checkpoint if they have trained (repeat to end at once)", flush=True
                )
                watcher.signal(number)
            elif signals[-1][1] - signals[0][1] > TOGETHER:
                print("ended at once", flush=True)
                os.killpg(launcher.pid, signal.SIGKILL)

        previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            failed, status = wait(launcher, watcher)
        finally:
            # The remaining processes of the session have a while to end by themselves.
            deadline = time.monotonic() + LAST_GRACE
            while session_alive(launcher.pid) and time.monotonic() < deadline:
                time.sleep(0.1)
            if session_alive(launcher.pid):
                os.killpg(launcher.pid, signal.SIGKILL)
            watcher.close()
            for number, handler in previous.items():
                signal.signal(number, handler)
    cause = None if signals else explain(run, failed, status, ranks)
    return Outcome(status, cause, signals[0][0] if signals else 0)


def wait(launcher: subprocess.Popen[bytes], watcher: RankWatcher) -> tuple[list[FailedRank], int]:
    """Wait for the launcher; return the ranks that have failed, the first one first, and the exit status."""
    failed: list[FailedRank] = []
    deadline = 0.0
    while launcher.poll() is None:
        failed += watcher.failed(POLL)
        if failed:
            deadline = deadline or time.monotonic() + LAST_GRACE
        # A lost host gets no grace period: detecting the loss has already taken long enough.
        if deadline and (time.monotonic() > deadline or any(one.rank is None for one in failed)):
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
    failed += watcher.failed(0)
    if launcher.returncode < 0 and failed and failed[0].code:
        return failed, shell_status(failed[0].code)  # this function killed the launcher after that rank had failed
    return failed, shell_status(launcher.returncode)


def shell_status(code: int) -> int:
    """Return a shell's exit status for an exit code, which is negative for a signal."""
    return code if code >= 0 else 128 - code


def find_ranks(launcher: int, known: set[int]) -> list[tuple[int, int]]:
    """Return the process id and the number of every rank below the launcher that is not `known`."""
    try:
        tree = psutil.Process(launcher).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return numbered(process for process in tree if process.pid not in known and is_rank(process))


def is_rank(process: psutil.Process) -> bool:
    """Return True if a process is a rank, and not a launcher whose command contains the rank's command."""
    try:
        command = process.cmdline()
    except psutil.NoSuchProcess:  # also for a zombie
        return False
    return RANK_MODULE in command and "deepspeed.launcher.launch" not in command


def session_alive(session: int) -> bool:
    """Return True if a process group still has members."""
    try:
        os.killpg(session, 0)
    except ProcessLookupError:
        return False
    return True
