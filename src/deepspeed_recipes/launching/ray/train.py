"""Run an attempt on a Ray cluster: `python -m ...ray.train RUN_FOLDER --address A ...`, which the launcher supervises.

Ray Train places and watches the workers, one for each rank, for one attempt only. `restarts.py` decides by a rank's
exit status whether to start another attempt, from which checkpoint and with how many ranks; Ray would also repeat a
user's mistake, and treat a rewind as a failure.
"""

import argparse
import os
import re
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from ...recipe.errors import first_line
from ...recipe.files import Json
from ...recipe.run_folder import RunFolder, write_json
from .. import command, ranks
from ..supervise import FailedRank
from . import nodes, rank
from .cluster import LOCAL

OBJECTS = 80 * 2**20
"""Bytes of shared memory for Ray's objects on a cluster that is started here: Ray's minimum, since a run has none."""

NODE_LOST = 20
"""Seconds within which Ray marks a node as dead after losing its workers: five checks, three seconds apart."""


class AllGpus(Backend):
    """No rendezvous by Ray; each rank has access to all GPUs of its node, as NCCL requires."""

    share_cuda_visible_devices = True


class Ranks(BackendConfig):
    """Replaces TorchConfig: no process group in Ray's workers, since the ranks create their own."""

    backend_cls = AllGpus


@dataclass(frozen=True)
class Attempt:
    """The command line: one attempt of a run."""

    folder: Path
    address: str
    ranks: int
    each: int
    nodes: str
    gpus: bool


def main(words: list[str] | None = None) -> int:
    """Run the attempt, print the ranks' output, write failures to the run folder, and return the exit status."""
    parser = argparse.ArgumentParser(prog="train.py", description=__doc__)
    parser.add_argument("folder", type=Path, help="the run's folder, shared by all nodes")
    parser.add_argument("--address", required=True, metavar="A", help=f"the cluster's address; {LOCAL} starts one here")
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="the world size")
    parser.add_argument("--each", type=int, required=True, metavar="N", help="ranks on each node")
    parser.add_argument("--nodes", default="", metavar="ID,...", help="Ray's ids of the nodes, except for a local one")
    parser.add_argument("--gpus", action="store_true", help="each rank has a GPU")
    options = Attempt(**vars(parser.parse_args(words)))
    run = RunFolder(options.folder)
    with rank.followed(run):
        return attempt(run, options)


def attempt(run: RunFolder, options: Attempt) -> int:
    """Run the ranks to their end and return the exit status: the first failed rank's, or 1 if Ray has failed."""
    local: Json = {}
    if options.address == LOCAL:
        counts = {"num_cpus": options.each, "num_gpus": options.each if options.gpus else 0}
        local = {**counts, "include_dashboard": False, "object_store_memory": OBJECTS}
    try:
        nodes.connect(options.address, **local)
    except Exception as reason:  # the cluster is gone, or one of its processes did not start
        print(f"Ray: {first_line(reason) or type(reason).__name__}", file=sys.stderr, flush=True)
        return 1
    chosen = options.nodes.split(",") if options.nodes else [node["id"] for node in nodes.alive()]
    error = fit(run, trainer(run, options, chosen), chosen)
    failed = failures(error, chosen)
    if error and not failed:
        print(f"Ray: {first_line(error) or type(error).__name__}", file=sys.stderr, flush=True)
    if failed:
        write_json(rank.failures(run), [asdict(one) for one in failed])
    ray.shutdown()
    return failed[0].code % 256 if failed and failed[0].code else int(error is not None)


def trainer(run: RunFolder, options: Attempt, chosen: list[str]) -> DataParallelTrainer:
    """Return the trainer, which runs one worker for each rank, `--each` of them on each of the nodes."""
    needed = ("PYTHONPATH", "TORCH_EXTENSIONS_DIR")
    given = command.forwarded(os.environ) | {name: os.environ[name] for name in needed if name in os.environ}
    places = [{"ray.io/node-id": chosen[number // options.each]} for number in range(options.ranks)]
    return DataParallelTrainer(
        rank.train,
        train_loop_config={"folder": str(run.path), "environment": given},
        backend_config=Ranks(),
        scaling_config=ScalingConfig(num_workers=options.ranks, use_gpu=options.gpus, label_selector=places),
        run_config=RunConfig(name="ray", storage_path=str(run.path), failure_config=FailureConfig(max_failures=0)),
    )


def fit(run: RunFolder, ready: DataParallelTrainer, chosen: list[str]) -> Exception | None:
    """Train, and return the error or None. SIGINT and SIGTERM go to the ranks, which write a checkpoint and end."""
    errors: list[Exception] = []
    signals: list[int] = []

    def work() -> None:
        try:
            ready.fit()
        except Exception as error:
            errors.append(error)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: signals.append(number))
    thread = threading.Thread(target=work)  # in the main thread Ray would end the ranks immediately at Ctrl-C
    thread.start()
    while thread.is_alive():
        thread.join(rank.POLL)
        while signals:
            received = signals.pop()
            # Once per machine, even if Ray has several nodes on it.
            machines = {node["address"]: node["id"] for node in nodes.alive() if node["id"] in chosen}
            sent = [nodes.on(node, ranks.send, received, str(run.path)) for node in machines.values()]
            ray.wait(sent, timeout=rank.POLL)
    return errors[0] if errors else None


def failures(error: Exception | None, chosen: list[str]) -> list[FailedRank]:
    """Return the nodes that were lost, or the ranks that have failed, the first one first."""
    found: dict[int, BaseException] = {}
    for number, one in getattr(error, "worker_failures", {}).items():
        found[number] = one
        while not isinstance(found[number], rank.RankFailed):  # a rank's own error is inside Ray's exceptions
            outer = found[number]
            inner = getattr(outer, "cause", None) or outer.__cause__ or getattr(outer, "health_check_failure", None)
            if not isinstance(inner, BaseException):
                break
            found[number] = inner
    reported = sorted((one for one in found.values() if isinstance(one, rank.RankFailed)), key=lambda one: one.ended)
    if error:  # Ray detects the loss of a worker before that of its node
        deadline = time.monotonic() + (NODE_LOST if len(reported) < len(found) else 0)
        while not (lost := set(chosen) - {node["id"] for node in nodes.alive()}) and time.monotonic() < deadline:
            time.sleep(rank.POLL)
        if lost:
            known = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
            return [FailedRank(None, None, known.get(node, node)) for node in sorted(lost)]
    # A lost worker has reported nothing: it was killed together with its rank, which makes the other ranks fail.
    gone = []
    for number, one in found.items():
        if one not in reported:
            place = re.search(r"^\s*ip: (\S+)", str(one), re.MULTILINE)
            gone.append(FailedRank(number, -signal.SIGKILL, place[1] if place else "a node"))
    return gone + [FailedRank(one.rank, one.code, one.host) for one in reported]


if __name__ == "__main__":
    sys.exit(main())
