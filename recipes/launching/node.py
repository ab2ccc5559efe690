"""One node's share of a run that a scheduler has started on each of its nodes: `python -m recipes.launching.node`.

The same command runs on every node. Started again after a preemption or a failure, it goes on from the newest whole
checkpoint; SIGTERM makes the ranks write one and end, with status 143, so that the scheduler knows of unfinished work.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from recipes.launching.supervise import RANK_MODULE, supervise
from recipes.spec import run_folder
from recipes.spec.run_folder import RunFolder

UNFINISHED = 128 + signal.SIGTERM
"""Exit status of a run that was stopped: with 0 Kubernetes would count it as complete."""


def main(words: Sequence[str] | None = None) -> int:
    """Run this node's ranks and return the exit status."""
    parser = argparse.ArgumentParser(prog="node.py", description=__doc__)
    parser.add_argument("folder", type=Path, help="the run's folder, shared by all nodes")
    parser.add_argument("--recipe", type=Path, metavar="F", help="recipe.json for a folder that has none yet")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--node-rank", type=int, default=node_rank(), help="default: as SLURM or Kubernetes says it")
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="ranks on this node")
    parser.add_argument("--master-addr", required=True, metavar="A", help="address of the first node")
    parser.add_argument("--master-port", required=True, type=int, metavar="P")
    options = parser.parse_args(words)
    run = RunFolder(options.folder)
    if has_ended(run):
        print(f"{run.path}: the run has ended already", flush=True)
        return 0
    if options.node_rank == 0:
        prepare(run, options.recipe)
    with tempfile.TemporaryDirectory() as folder:
        hostfile = Path(folder, "hosts")
        hostfile.write_text("".join(f"node-{node} slots={options.gpus}\n" for node in range(options.nodes)))
        ended = supervise(command(run, options, hostfile), dict(os.environ), run, options.gpus)
    if ended.cause:
        print(ended.cause, file=sys.stderr, flush=True)
    status = ended.status
    return UNFINISHED if status == 0 and not has_ended(run) else status


def node_rank() -> int:
    """Return this node's number, from SLURM or from an indexed Kubernetes job."""
    return int(os.environ.get("SLURM_NODEID") or os.environ.get("JOB_COMPLETION_INDEX") or 0)


def has_ended(run: RunFolder) -> bool:
    """Return whether the run has come to its end, and was not only stopped."""
    return run.summary.exists() and not run_folder.read_json(run.summary)["stopped"]


def prepare(run: RunFolder, recipe: Path | None) -> None:
    """Make the folder ready for a first start, or for another one after steps were lost; on the first node only."""
    if recipe and not run.recipe.exists():
        run.path.mkdir(parents=True, exist_ok=True)
        shutil.copy(recipe, run.recipe)
    checkpoint = run_folder.newest_checkpoint(run)
    if checkpoint:
        print(f"going on from {checkpoint}", flush=True)
        run_folder.forget_after(run, checkpoint)
        return
    for lost in (run.metrics, run.evaluations, run.summary):
        lost.unlink(missing_ok=True)
    shutil.rmtree(run.checkpoints, ignore_errors=True)


def command(run: RunFolder, options: argparse.Namespace, hostfile: Path) -> list[str]:
    """Return DeepSpeed's launcher for one node of several, which starts no ssh."""
    place = ("--node_rank", str(options.node_rank), "--master_addr", options.master_addr)
    return [
        *(sys.executable, "-m", "deepspeed.launcher.runner", "--quiet", "--no_local_rank", "--no_ssh"),
        *("--hostfile", str(hostfile), *place, "--master_port", str(options.master_port)),
        *("--module", RANK_MODULE, str(run.path)),
    ]


if __name__ == "__main__":
    sys.exit(main())
