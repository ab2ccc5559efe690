"""A run's ranks on one machine: finds their processes, reports ranks that fail, and sends them signals.

    python -m deepspeed_recipes.launching.ranks signal NUMBER RUN_FOLDER
    python -m deepspeed_recipes.launching.ranks watch EXPECTED RUN_FOLDER

The launcher runs `watch` on every other host. `watch` prints one line of JSON for each rank that fails, and kills the
ranks when the launcher is silent for too long, so that a host that is cut off does not keep training alone.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

RANK = ["-u", "-m", "deepspeed_recipes.training.run"]
LAUNCHER = ["-u", "-m", "deepspeed.launcher.launch"]
"""The words after Python in the commands of a rank and of DeepSpeed's launcher on other hosts. In the commands of `ssh`
and `pdsh` these words are at a later position."""
WATCHER = ["-m", "deepspeed_recipes.launching.ranks", "watch"]
"""The words with which `ssh.remote` starts this module."""
POLL = 0.5
"""Seconds between two searches for new ranks; the death of a known rank is noticed at once."""
SILENCE = 90
"""Seconds of silence from the launcher after which a host's ranks are killed; longer than ssh occupies it."""


def of_run(folder: str, *kinds: list[str]) -> Iterator[psutil.Process]:
    """Yield this machine's processes for a run folder, kind by kind."""
    for kind in kinds:
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if command[1:4] != kind or folder not in command:
                continue
            try:  # several slurmd may share a machine
                here = process.environ().get("SLURM_NODEID") == os.environ.get("SLURM_NODEID")
            except psutil.Error:  # the process has just ended
                continue
            if here:
                yield process


def numbered(processes: Iterator[psutil.Process]) -> list[tuple[int, int]]:
    """Return the process id and the rank number of each rank."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error, KeyError):
            found.append((process.pid, int(process.environ()["RANK"])))
    return found


class RankMonitor:
    """Detects failures of this machine's ranks."""

    def __init__(self, find: Callable[[set[int]], list[tuple[int, int]]], expected: int) -> None:
        """`find(known)` returns the process id and the number of each rank whose process id is not in `known`."""
        self.find = find
        self.expected = expected
        self.found: dict[int, tuple[int, int]] = {}  # by a descriptor that becomes readable when the process ends
        self.poll = select.poll()
        self.next_search = 0.0

    def failed(self, seconds: float) -> list[tuple[int, int | None]]:
        """Wait at most `seconds`, and return the number and the exit code of each rank that has failed meanwhile.

        Killed ranks come first: on a busy machine, ranks that lost their connection to them may be found together.
        """
        now = time.monotonic()
        if len(self.found) < self.expected and now >= self.next_search:
            self.next_search = now + 2 * POLL
            for pid, rank in self.find({pid for pid, _ in self.found.values()}):
                with contextlib.suppress(ProcessLookupError):
                    descriptor = os.pidfd_open(pid)
                    self.found[descriptor] = (pid, rank)
                    self.poll.register(descriptor, select.POLLIN)
        ended = []
        for descriptor, _ in self.poll.poll(1000 * seconds):
            self.poll.unregister(descriptor)
            pid, rank = self.found[descriptor]
            code = None  # no longer known
            # Only the parent, DeepSpeed's launcher, may wait for the process, but until then /proc has its status.
            with contextlib.suppress(OSError, ValueError, IndexError):
                status = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[-1])
                code = os.waitstatus_to_exitcode(status)
            ended.append((rank, code))
        return sorted((one for one in ended if one[1] != 0), key=lambda one: one[1] != -signal.SIGKILL)

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in self.found:
            os.close(descriptor)


def send(number: int, folder: str) -> int:
    """Send a signal to the run's ranks, and return the number of processes that received it.

    SIGKILL is also sent to their launchers, and first, since a launcher would report killed ranks as failures. It is
    also sent to watchers whose launcher was cut off from this host, since they would kill the next attempt.
    """
    kinds = (WATCHER, LAUNCHER, RANK) if number == signal.SIGKILL else (RANK,)
    found = [process for process in of_run(folder, *kinds) if process.pid != os.getpid()]
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):  # the process has just ended
            process.send_signal(number)
    return len(found)


def watch(expected: int, folder: str) -> None:
    """Print each rank that fails, as long as data arrives on standard input; then kill the remaining ranks."""
    monitor = RankMonitor(lambda known: numbered(one for one in of_run(folder, RANK) if one.pid not in known), expected)
    heard = time.monotonic()
    with contextlib.suppress(BrokenPipeError):
        while time.monotonic() < heard + SILENCE:
            for rank, code in monitor.failed(POLL):
                print(json.dumps({"rank": rank, "code": code}), flush=True)
            if select.select([sys.stdin], [], [], 0)[0]:
                if not os.read(sys.stdin.fileno(), 4096):
                    break
                heard = time.monotonic()
    send(signal.SIGKILL, folder)


if __name__ == "__main__":
    if sys.argv[1] == "watch":
        watch(int(sys.argv[2]), sys.argv[3])
    else:
        print(send(int(sys.argv[2]), sys.argv[3]))
