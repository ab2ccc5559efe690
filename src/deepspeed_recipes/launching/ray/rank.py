"""The functions that Ray's processes run: each worker starts one rank, and a task describes a node.

Ray's processes import this module, so it has few imports. The rank is a separate process, the same as under every other
launcher: it needs its main thread for signals, and its exit status shows how the run ended.
"""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from ...machine import children
from ...recipe.files import Json
from ...recipe.run_folder import RunFolder
from ...training.rendezvous import free_port
from ..command import share_of_cores
from ..ranks import RANK
from ..ssh import host_info

POLL = 0.2
"""Seconds between two reads of the ranks' output."""


def of_rank(run: RunFolder, rank: int | str) -> Path:
    """Return the file of a rank's output, including that of native libraries."""
    return run.ranks / f"rank-{rank}.output"


def failures(run: RunFolder) -> Path:
    """Return the file that lists the failed ranks and nodes of the last attempt."""
    return run.ranks / "failed.json"


@contextlib.contextmanager
def followed(run: RunFolder) -> Iterator[None]:
    """Print the ranks' output line by line during a `with` block."""
    shown = {file: file.stat().st_size for file in run.ranks.glob(of_rank(run, "*").name)}
    ended = threading.Event()

    def follow() -> None:
        last = False
        while not last:
            last = ended.wait(POLL)
            for file in sorted(run.ranks.glob(of_rank(run, "*").name)):
                shown[file] = show(file, shown.get(file, 0), last)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def show(file: Path, start: int, all_of_it: bool) -> int:
    """Print a file's complete lines from a position on, or all of the rest, and return the new position."""
    with file.open("rb") as text:
        text.seek(start)
        new = text.read()
    if not all_of_it:
        new = new[: new.rfind(b"\n") + 1]
    sys.stdout.write(new.decode(errors="replace") + ("" if new.endswith(b"\n") or not new else "\n"))
    sys.stdout.flush()
    return start + len(new)


class RankFailed(Exception):
    """A rank that did not exit with 0: its number, its exit code, its host, and when it ended."""

    def __init__(self, rank: int, code: int, host: str, ended: float) -> None:
        super().__init__(rank, code, host, ended)
        self.rank, self.code, self.host, self.ended = rank, code, host, ended


def train(config: Json) -> None:
    """Start this worker's rank and wait for its end; `config` has the run's `folder` and the ranks' `environment`.

    Raises:
        RankFailed: the rank has failed.
    """
    import ray
    from ray.train import collective, get_context

    own = get_context()
    here = ray.util.get_node_ip_address()
    address, port = collective.broadcast_from_rank_zero((here, free_port(here)))
    place = {"RANK": own.get_world_rank(), "WORLD_SIZE": own.get_world_size(), "LOCAL_RANK": own.get_local_rank()}
    place |= {"LOCAL_SIZE": own.get_local_world_size(), "CROSS_RANK": own.get_node_rank()}
    place |= {"MASTER_ADDR": address, "MASTER_PORT": port}
    run = RunFolder(Path(config["folder"]))
    run.ranks.mkdir(parents=True, exist_ok=True)
    variables = environment(config["environment"], place)
    with of_rank(run, own.get_world_rank()).open("ab") as file:
        command = [sys.executable, *RANK, str(run.path)]  # it ends with this process
        code = children.run(command, env=variables, stdout=file, stderr=file).returncode
    if code:
        raise RankFailed(own.get_world_rank(), code, socket.gethostname(), time.time())


def environment(given: dict[str, str], place: Json) -> dict[str, str]:
    """Return a rank's variables: its node's own, those that the launcher has forwarded, and its position."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    # Ray sets this to the number of CPUs that it has reserved for the worker, 1.
    threads = {"OMP_NUM_THREADS": share_of_cores(place["LOCAL_SIZE"])}
    return os.environ | threads | {"PATH": path} | given | {name: str(value) for name, value in place.items()}


def describe(folder: str, file: str, peer: str, extensions: str) -> Json:
    """Return the facts about this node that must be equal on all nodes, from `host_info`."""
    os.environ["TORCH_EXTENSIONS_DIR"] = extensions
    return host_info.collect(Path(folder), file, peer)
