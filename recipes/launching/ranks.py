"""A run's ranks on one machine: found, heard of when they end, and signalled.

    python -m recipes.launching.ranks signal NUMBER RUN_FOLDER
    python -m recipes.launching.ranks watch EXPECTED RUN_FOLDER

`watch` is the launcher's ear on another host. It prints one line of JSON for each rank that ends badly, and ends the
ranks itself when it hears nothing from the launcher any more: a host that was cut off does not train on alone.
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

RANK = ["-u", "-m", "recipes.training.run"]
LAUNCHER = ["-u", "-m", "deepspeed.launcher.launch"]
"""How DeepSpeed starts a rank, and on other hosts its own launcher. `ssh` and `pdsh` have the same words later on."""
WATCHER = ["-m", "recipes.launching.ranks", "watch"]
"""How `hosts.Watchers` starts this module."""
POLL = 0.5
"""Seconds between two looks at whether there are more ranks; a rank's death is noticed at once."""
SILENCE = 90
"""Seconds without a word from the launcher after which a host's ranks are ended: more than it may be busy with ssh."""


def of_run(folder: str, *kinds: list[str]) -> Iterator[psutil.Process]:
    """Yield the folder's processes of these kinds on this machine, kind by kind."""
    for kind in kinds:
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if command[1:4] == kind and folder in command and _of_this_node(process):
                yield process


def _of_this_node(process: psutil.Process) -> bool:
    """Return whether a rank is this SLURM node's: several slurmd may share a machine."""
    try:
        return process.environ().get("SLURM_NODEID") == os.environ.get("SLURM_NODEID")
    except psutil.Error:  # it ended by itself
        return False


def numbered(processes: Iterator[psutil.Process]) -> list[tuple[int, int]]:
    """Return the ids of ranks' processes with the ranks' numbers."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error, KeyError):
            found.append((process.pid, int(process.environ()["RANK"])))
    return found


class Watched:
    """The ranks of this machine, told of as they end."""

    def __init__(self, find: Callable[[set[int]], list[tuple[int, int]]], expected: int) -> None:
        """`find(known)` returns the process id and the number of each rank that is not known yet."""
        self.find = find
        self.expected = expected
        self.found: dict[int, tuple[int, int]] = {}  # by a descriptor that tells of the process' end
        self.poll = select.poll()
        self.next_look = 0.0

    def fallen(self, seconds: float) -> list[tuple[int, int | None]]:
        """Wait at most `seconds` and return the number and the exit code of each rank that has ended badly."""
        now = time.monotonic()
        if len(self.found) < self.expected and now >= self.next_look:
            self.next_look = now + 2 * POLL
            for pid, rank in self.find({pid for pid, _ in self.found.values()}):
                with contextlib.suppress(ProcessLookupError):
                    descriptor = os.pidfd_open(pid)
                    self.found[descriptor] = (pid, rank)
                    self.poll.register(descriptor, select.POLLIN)
        ended = []
        for descriptor, _ in self.poll.poll(1000 * seconds):
            self.poll.unregister(descriptor)
            pid, rank = self.found[descriptor]
            ended.append((rank, exit_code(pid)))
        return [(rank, code) for rank, code in ended if code != 0]

    def close(self) -> None:
        """Let go of the processes."""
        for descriptor in self.found:
            os.close(descriptor)


def exit_code(pid: int) -> int | None:
    """Return the exit code of a process that has just ended: negative for a signal, None where its parent was faster.

    Only a parent may wait for it, and that is DeepSpeed's launcher; but until the parent does, /proc tells.
    """
    try:
        status = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[-1])
    except (OSError, ValueError, IndexError):
        return None
    return os.waitstatus_to_exitcode(status)


def send(number: int, folder: str) -> int:
    """Signal the run's ranks and return how many processes there were.

    SIGKILL goes to their launchers too, and first: a launcher that sees its ranks die calls that a failure of theirs.
    It also goes to who watches them for a launcher that this host was cut off from, lest that ends the next attempt.
    """
    kinds = (WATCHER, LAUNCHER, RANK) if number == signal.SIGKILL else (RANK,)
    found = [process for process in of_run(folder, *kinds) if process.pid != os.getpid()]
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended by itself
            process.send_signal(number)
    return len(found)


def watch(expected: int, folder: str) -> None:
    """Print each rank's bad end, as long as something comes from standard input; then end what is left."""
    watched = Watched(lambda known: numbered(one for one in of_run(folder, RANK) if one.pid not in known), expected)
    heard = time.monotonic()
    with contextlib.suppress(BrokenPipeError):
        while time.monotonic() < heard + SILENCE:
            for rank, code in watched.fallen(POLL):
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
