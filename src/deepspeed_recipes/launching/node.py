"""Run one node's ranks of a run that a scheduler has started: `python -m deepspeed_recipes.launching.node`.

Every node runs the same command. After a preemption or a failure, the restarted command resumes from the newest
complete checkpoint. On SIGTERM the ranks write a checkpoint and end; the exit status is then 143, which shows the
scheduler that the run is unfinished.
"""

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..machine import children, run_lock
from ..recipe import files, overrides, run_folder
from ..recipe.conversions import from_dict
from ..recipe.errors import UserError, lasting
from ..recipe.run_folder import RunFolder
from ..report import write
from ..report.profiler import verdict
from ..training import without_launcher
from ..training.tracking import writer
from .command import QUIETLY, threads
from .supervise import RANK_MODULE, supervise

UNFINISHED = 128 + signal.SIGTERM
"""Exit status of a run that was stopped; with 0 Kubernetes would consider it complete."""


@dataclass(frozen=True)
class Node:
    """The command line: one of the run's nodes."""

    folder: Path
    recipe: Path | None
    nodes: int
    node_rank: int
    gpus: int
    master_addr: str
    master_port: int


def main(words: Sequence[str] | None = None) -> int:
    """Read the command line, run this node's ranks, and return the exit status."""
    parser = argparse.ArgumentParser(prog="node.py", description=__doc__)
    parser.add_argument("folder", type=Path, help="the run's folder, shared by all nodes")
    parser.add_argument("--recipe", type=Path, metavar="F", help="recipe.json to copy into a new run folder")
    parser.add_argument("--nodes", type=int, required=True, metavar="N", help="number of nodes")
    parser.add_argument(
        "--node-rank", type=int, default=node_rank(), metavar="N", help="default: from SLURM or Kubernetes"
    )
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="ranks on this node")
    parser.add_argument("--master-addr", required=True, metavar="A", help="address of the first node")
    parser.add_argument("--master-port", required=True, type=int, metavar="P", help="port on the first node")
    node = Node(**vars(parser.parse_args(words)))
    run = RunFolder(node.folder)
    check_recipe(run, node.recipe)
    if run_folder.is_finished(run):
        print(f"{run.path}: this run has already finished", flush=True)
        return 0
    # The first node locks the run; a moved pod or job waits until its predecessor is certainly dead.
    lock = run_lock.hold(run.path, wait=2 * run_lock.SILENT) if node.node_rank == 0 else contextlib.nullcontext()
    with lock:
        return start(run, node)


def start(run: RunFolder, node: Node) -> int:
    """Run this node's ranks and return the exit status."""
    if node.node_rank == 0:
        prepare(run, node.recipe, node.nodes * node.gpus)
    with children.scratch() as folder:
        hostfile = folder / "hosts"
        slots = max(node.gpus, 1 + max(map(int, own_devices(node.gpus)), default=0))
        hostfile.write_text("".join(f"node-{number} slots={slots}\n" for number in range(node.nodes)))
        environment = os.environ | {"OMP_NUM_THREADS": threads(node.gpus)}
        outcome = supervise(command(run, node, hostfile), environment, run, node.gpus)
    if outcome.cause:
        print(outcome.cause, file=sys.stderr, flush=True)
    if node.node_rank == 0:
        if outcome.status:
            writer.failed(run, outcome.cause, outcome.status)
        verdict.at_end(run)
        write.at_end(run)
        writer.upload(run)
    return UNFINISHED if outcome.status == 0 and not run_folder.is_finished(run) else outcome.status


def own_devices(ranks: int) -> list[str]:
    """Return the GPUs that the scheduler has given this job, where they are not the first ones of a node.

    DeepSpeed's launcher ignores CUDA_VISIBLE_DEVICES if there is a hostfile, and would use GPUs of another job.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "").split(",")[:ranks]
    numbered = all(device.isdecimal() for device in chosen) and len(chosen) == ranks
    return chosen if numbered and chosen != list(map(str, range(ranks))) else []


def node_rank() -> int:
    """Return this node's number, from SLURM or from an indexed Kubernetes Job."""
    return int(os.environ.get("SLURM_NODEID") or os.environ.get("JOB_COMPLETION_INDEX") or 0)


def check_recipe(run: RunFolder, recipe: Path | None) -> None:
    """Refuse a folder with the run of another recipe than the job's, which would be resumed instead."""
    if recipe and run.recipe.exists():
        differences = overrides.differences(run_folder.read_recipe(run), from_dict(run_folder.read_json(recipe)))
        if differences:
            raise UserError(
                f"{run.path}: has a run with other settings; the job's are {' '.join(differences)};\nremove "
                "that folder, or prepare the job with another --output-dir, whose name the folder has."
            )


def prepare(run: RunFolder, recipe: Path | None, world_size: int) -> None:
    """Prepare the folder for the first start, or for a restart after steps were lost; on the first node only."""
    if recipe and not run.recipe.exists():
        files.write_bytes(run.recipe, recipe.read_bytes())
    without_launcher.prepare(run, world_size)


def command(run: RunFolder, node: Node, hostfile: Path) -> list[str]:
    """Return DeepSpeed's launcher for one of several nodes, without ssh."""
    devices = {number: ",".join(map(str, range(node.gpus))) for number in range(node.nodes)}
    if own := own_devices(node.gpus):
        devices[node.node_rank] = ",".join(own)
    chosen = "@".join(f"node-{number}:{found}" for number, found in devices.items())
    position = ("--node_rank", str(node.node_rank), "--master_addr", node.master_addr)
    return [
        *(sys.executable, "-m", "deepspeed.launcher.runner", *QUIETLY, "--no_ssh"),
        *("--hostfile", str(hostfile), "--include", chosen, *position, "--master_port", str(node.master_port)),
        *("--module", RANK_MODULE, str(run.path)),
    ]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as error:
        reason = str(error) if isinstance(error, UserError) else lasting(error, sys.argv[1])
        if reason is None:
            raise
        print(reason, file=sys.stderr, flush=True)
        sys.exit(2)
