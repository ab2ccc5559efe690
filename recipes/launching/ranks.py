"""A run's ranks on this machine, told by its folder: `python -m recipes.launching.ranks SIGNAL_NUMBER RUN_FOLDER`."""

import contextlib
import signal
import sys
from collections.abc import Iterator

import psutil

RANK_MODULE = "recipes.training.run"
LAUNCHER_MODULE = "deepspeed.launcher.launch"


def of_run(folder: str, launchers: bool = False) -> Iterator[psutil.Process]:
    """Yield the processes that run the folder's ranks, and DeepSpeed's per-node launchers too if wanted."""
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if RANK_MODULE in command and folder in command and (launchers or LAUNCHER_MODULE not in command):
            yield process


def send(number: int, folder: str) -> int:
    """Signal the run's ranks and return how many there were; SIGKILL goes to the launchers first."""
    found = list(of_run(folder, launchers=number == signal.SIGKILL))
    # A launcher that sees its ranks die would report that as a failure of theirs.
    for process in sorted(found, key=lambda one: LAUNCHER_MODULE not in one.info["cmdline"]):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended by itself
            process.send_signal(number)
    return len(found)


if __name__ == "__main__":
    print(send(int(sys.argv[1]), sys.argv[2]))
