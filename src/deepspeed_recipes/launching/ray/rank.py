"""The functions that Ray's processes run: each worker starts one rank, and tasks describe a node or signal its ranks.

Ray's processes import this module, so it has few imports. The rank is a separate process, the same as under every other
launcher: it needs its main thread for signals, and its exit status shows how the run ended.
"""

import os
import socket
import sys
import time
from pathlib import Path

from ...machine import children
from ...recipe.files import Json
from ...recipe.run_folder import RunFolder
from ...training.rendezvous import free_port
from ..command import share_of_cores
from ..ranks import RANK, send
from ..ssh import host_info
from . import output


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
    with output.of_rank(run, own.get_world_rank()).open("ab") as file:
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


def signal_ranks(number: int, folder: str) -> int:
    """Send a signal to the run's ranks on this machine, and return their number."""
    return send(number, folder)
