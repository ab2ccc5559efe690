"""The commands with which other launchers start the ranks of a run folder: torchrun, mpirun and srun."""

import os
import shlex
import sys

from ..recipe.project import python_path
from ..recipe.run_folder import RunFolder
from .supervise import RANK_MODULE

HOST = "HOST"
"""Placeholder for the host of rank 0."""


def commands(run: RunFolder, ranks: int, nodes: int) -> dict[str, str]:
    """Return each launcher's shell command, by the launcher's name, for `ranks` ranks per node."""
    variables = python_path({})
    path = [f"{name}={value}" for name, value in variables.items()]
    # Otherwise each rank would use all cores; torchrun sets 1, which is too few for CPU Adam.
    threads = f"OMP_NUM_THREADS={max(1, (os.cpu_count() or 1) // ranks)}"
    rank = (*("-m", RANK_MODULE), str(run.path.resolve()))
    one = nodes == 1
    meet = ("--standalone",) if one else ("--nnodes", str(nodes), "--rdzv_backend", "c10d", "--rdzv_endpoint", HOST)
    found = {
        "torchrun": (sys.executable, "-m", "torch.distributed.run", *meet, "--nproc_per_node", str(ranks), *rank),
        "mpirun": (
            *("mpirun", "-np", str(ranks * nodes)),
            *(() if one else ("--map-by", f"ppr:{ranks}:node", "-x", f"MASTER_ADDR={HOST}")),
            *(() if one else [word for name in variables for word in ("-x", name)]),
            *(sys.executable, *rank),
        ),
        "srun": ("srun", "--nodes", str(nodes), "--ntasks-per-node", str(ranks), sys.executable, *rank),
    }
    return {name: shlex.join([*path, threads, *words]) for name, words in found.items()}
