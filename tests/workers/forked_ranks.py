"""In the place of DeepSpeed's launcher: ranks that are forks of one process, which imports the stack once.

python -m tests.workers.forked_ranks RANKS PORT recipes.training.run RUN_FOLDER
"""

import os
import signal
import sys
import time
import traceback
from pathlib import Path

import tests.preload  # noqa: F401
from recipes.spec.run_folder import write_json
from recipes.training import run as training_run

GRACE = 30
"""Seconds that DeepSpeed's launcher gives the other ranks."""


def main(size: str, port: str, module: str, folder: str) -> int:
    pids = {}
    for rank in range(int(size)):
        pid = os.fork()
        if not pid:
            be_rank(rank, size, port, folder)
        pids[pid] = rank
    write_json(Path(folder, "pids.json"), list(pids.items()))
    while pids:
        time.sleep(1)
        for pid in list(pids):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del pids[pid]
                if status:
                    end(list(pids))
                    return os.waitstatus_to_exitcode(status) % 256
    return 0


def be_rank(rank: int, size: str, port: str, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
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


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
