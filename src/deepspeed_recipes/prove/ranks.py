"""Ranks as forks of a process that has imported the stack: they start at once and share nothing except imports.

Each group of ranks starts afresh: anything that it leaves behind (groups, singletons, a hang, a crash) ends with it. A
program that starts ranks needs `if __name__ == "__main__":`, since each rank imports it.
"""

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..training.rendezvous import free_port

PRELOADED = "deepspeed_recipes.prove.preload"


class Ranks:
    """Runs a function on several ranks, as the launcher would."""

    def __init__(self, preloaded: Sequence[str] = (PRELOADED,)) -> None:
        """`preloaded`: the modules that are imported before ranks start."""
        self.preloaded = list(preloaded)

    def __enter__(self) -> "Ranks":
        self.context: Any = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(self.preloaded)
        return self

    def __exit__(self, *_: object) -> None:
        for process in multiprocessing.active_children():
            process.kill()

    def start(
        self, function: Callable[..., Any], *arguments: object, world_size: int = 2, log: Path, port: int | None = None
    ) -> list[Any]:
        """Start `function(*arguments)` on every rank; each rank's output goes to `log` with the rank's number."""
        port = port or free_port()
        processes = []
        for rank in range(world_size):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "CROSS_RANK": "0",  # as DeepSpeed's launcher sets it
                "LOCAL_SIZE": "1",  # only the launcher uses the number of siblings, and there is none
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            if "HF_DATASETS_CACHE" in os.environ:  # set since the first rank was started
                environment["HF_DATASETS_CACHE"] = os.environ["HF_DATASETS_CACHE"]
            target = (function, arguments, environment, str(log) + f".{rank}")
            processes.append(self.context.Process(target=_rank, args=target, daemon=True))
        for process in processes:
            process.start()
        return processes

    def run(
        self, function: Callable[..., Any], *arguments: object, world_size: int = 2, log: Path, timeout: float = 240
    ) -> list[int]:
        """Run to the end and return the ranks' exit statuses; after `timeout` seconds they are killed."""
        port = free_port()
        processes = self.start(function, *arguments, world_size=world_size, log=log, port=port)
        deadline = time.monotonic() + timeout
        for process in processes:
            process.join(max(0, deadline - time.monotonic()))
        for process in processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                process.join()
        for buffer in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
            buffer.unlink(missing_ok=True)  # killed CPU ranks leave 66 MB each, in memory
        return [process.exitcode for process in processes]

    def check(self, function: Callable[..., Any], *arguments: object, log: Path, **options: Any) -> None:
        """Run, and fail with the ranks' output unless all ranks end with status 0."""
        statuses = self.run(function, *arguments, log=log, **options)
        assert not any(statuses), f"exit statuses {statuses}\n" + "\n".join(read_logs(log))


def read_logs(log: Path) -> list[str]:
    """Return the output of each rank."""
    return [file.read_text(errors="replace") for file in sorted(log.parent.glob(log.name + ".*"))]


def _rank(function: Callable[..., Any], arguments: tuple[object, ...], environment: dict[str, str], log: str) -> None:
    os.environ |= environment
    threading.Thread(target=_end_with_the_program, daemon=True).start()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        function(*arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _end_with_the_program() -> None:
    """End this rank when the program that started it has ended; otherwise it might wait in a collective forever."""
    program = multiprocessing.parent_process()
    assert program is not None
    program.join()
    os._exit(1)
