"""A run's ranks on this machine, told by its folder: `python -m recipes.launching.ranks SIGNAL_NUMBER RUN_FOLDER`."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

import psutil

RANK = ["-u", "-m", "recipes.training.run"]
LAUNCHER = ["-u", "-m", "deepspeed.launcher.launch"]
"""How DeepSpeed starts a rank, and on other hosts its own launcher. `ssh` and `pdsh` have the same words later on."""


def of_run(folder: str, launchers: bool) -> Iterator[psutil.Process]:
    """Yield the processes that run the folder's ranks, after DeepSpeed's launchers on this machine if wanted."""
    kinds = (LAUNCHER, RANK) if launchers else (RANK,)
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


def send(number: int, folder: str) -> int:
    """Signal the run's ranks and return how many processes there were.

    SIGKILL goes to their launchers too, and first: a launcher that sees its ranks die calls that a failure of theirs.
    """
    found = list(of_run(folder, launchers=number == signal.SIGKILL))
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended by itself
            process.send_signal(number)
    return len(found)


if __name__ == "__main__":
    print(send(int(sys.argv[1]), sys.argv[2]))
