"""The launcher as a fork of a process that has imported the stack, with ranks that are forks too.

Only DeepSpeed's per-machine launcher is replaced, by `be_launcher`: its imports take half a minute of CPU.
"""

import contextlib
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

from deepspeed_recipes.commands import main
from deepspeed_recipes.launching import restarts, supervise
from deepspeed_recipes.machine import children
from deepspeed_recipes.recipe.run_folder import append_jsonl, read_jsonl
from deepspeed_recipes.training import run as training_run
from tests.ranks import free_port

PROCESSES = "processes.jsonl"
"""In the run folder, one line per attempt: forks do not show what they are, so it is recorded."""
GRACE = 30
"""Seconds that DeepSpeed's launcher gives the other ranks."""


def quick_launch(arguments: list[str], log: str) -> None:
    """Do what `python scripts/launch.py` does; executed in a fork."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = ["launch.py", *arguments]
    restarts.deepspeed_command = lambda run, ranks, *_: [str(ranks), str(free_port()), str(run.path)]
    supervise.children, supervise.find_ranks = SimpleNamespace(running=running), find_ranks
    status = main.run("launch", arguments)
    sys.stdout.flush()
    os._exit(status)


def find_ranks(launcher: int, known: set[int]) -> list[tuple[int, int]]:
    run = Path(sys.argv[sys.argv.index("--output-dir") + 1])
    attempts = [one for one in read_jsonl(run / PROCESSES) if one["launcher"] == launcher]
    return [(pid, rank) for one in attempts for rank, pid in enumerate(one["ranks"]) if pid not in known]


@contextlib.contextmanager
def running(command, env):
    """Do what `children.running` does."""
    forked = Forked(command, env)
    try:
        with children.killed_with_this_process(forked.pid):
            yield forked
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(forked.pid, signal.SIGKILL)
        forked.wait()


class Forked:
    """What `supervise` uses of `subprocess.Popen`."""

    def __init__(self, command, env):
        self.returncode = None
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            os.setsid()
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            os.environ |= env
            os._exit(be_launcher(*command))

    def poll(self):
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self):
        while self.poll() is None:
            time.sleep(0.01)


def be_launcher(size: str, port: str, folder: str) -> int:
    """Start the ranks; when one fails, end the others and return its status, as DeepSpeed's launcher does."""
    pids = [os.fork() or be_rank(rank, size, port, folder) for rank in range(int(size))]
    append_jsonl(Path(folder, PROCESSES), {"launcher": os.getpid(), "ranks": pids})
    while pids:
        time.sleep(1)
        for pid in list(pids):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                pids.remove(pid)
                if status:
                    end(pids)
                    return os.waitstatus_to_exitcode(status) % 256
    return 0


def be_rank(rank: int, size: str, port: str, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "CROSS_RANK": "0"}  # as launch.py's ranks have
    try:
        training_run.main(folder)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def end(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    for pid in pids:
        while not os.waitpid(pid, os.WNOHANG)[0]:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
