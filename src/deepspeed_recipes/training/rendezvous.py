"""Completes the variables by which ranks find each other, from those of the launcher that started them.

DeepSpeed's launcher and torchrun set all of torch's variables, and `accelerate launch` is torchrun. mpirun and srun set
their own, and an operator such as Kubeflow's sets some.
"""

import re
import socket
import zlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from ..recipe.errors import UserError

COMPLETE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""The variables that torch needs; launchers with support for torch set all of them."""
WATCHED = "CROSS_RANK"
"""Set by DeepSpeed's launcher, and so whenever ds-recipes launch watches the ranks."""
TORCHRUN = "TORCHELASTIC_RUN_ID"
PORTS = range(20000, 30000)
"""Without a given port the ranks choose one of these by the job's name; below those that Linux assigns."""
SINGLE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
"""The variables of a process that no launcher has started."""


@dataclass(frozen=True)
class Launcher:
    """A launcher, and the names of the variables that it sets."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_size: str
    job: str
    """The variable that differs between jobs that run at the same time."""


LAUNCHERS = (
    Launcher(
        name="mpirun",
        rank="OMPI_COMM_WORLD_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        job="PMIX_NAMESPACE",
    ),
    Launcher(  # MPICH's and Intel MPI's
        name="mpirun",
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
        job="PMI_PORT",
    ),
    Launcher(
        name="srun",
        rank="SLURM_PROCID",
        world_size="SLURM_STEP_NUM_TASKS",  # only in a step of srun: a batch script has SLURM_PROCID too
        local_rank="SLURM_LOCALID",
        local_size="SLURM_STEP_TASKS_PER_NODE",
        job="SLURM_JOB_ID",
    ),
)


def complete(environment: MutableMapping[str, str]) -> None:
    """Set those of torch's variables that are missing; refuse two launchers that contradict each other."""
    if not ({WATCHED, TORCHRUN} & set(environment) and set(COMPLETE) <= set(environment)):
        for name, value in _found(environment).items():
            if environment.setdefault(name, value) != value and name in ("RANK", "WORLD_SIZE"):
                raise UserError(
                    f"{name}={environment[name]} contradicts the launcher's {value}; unset {name}, "
                    "or start the ranks with one launcher."
                )
    if "LOCAL_WORLD_SIZE" in environment:  # torchrun's name for it
        environment.setdefault("LOCAL_SIZE", environment["LOCAL_WORLD_SIZE"])
    rank, world_size = (_number(environment, name) for name in ("RANK", "WORLD_SIZE"))
    if rank >= world_size:
        raise UserError(f"RANK={rank}: must be below WORLD_SIZE={world_size}.")


def is_watched(environment: Mapping[str, str]) -> bool:
    """Return whether our launcher watches the ranks, and writes the report after them."""
    return WATCHED in environment


def _found(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torch's variables from the launcher's own."""
    launcher = next((one for one in LAUNCHERS if {one.rank, one.world_size} <= set(environment)), None)
    if launcher is None:
        if not {"RANK", "WORLD_SIZE"} & set(environment):
            return {**SINGLE, "MASTER_PORT": str(free_port())}
        missing = [name for name in COMPLETE if name not in environment and name != "LOCAL_RANK"]
        if missing:
            raise UserError(f"{', '.join(missing)}: not set; every rank needs {', '.join(COMPLETE)}.")
        return {"LOCAL_RANK": "0"}  # an operator starts one rank in each pod
    found = {"RANK": environment[launcher.rank], "WORLD_SIZE": environment[launcher.world_size]}
    found["LOCAL_RANK"] = environment.get(launcher.local_rank, "0")
    local = environment.get(launcher.local_size, "")
    if local.isdecimal():  # SLURM writes `2(x3)` for three nodes
        found["LOCAL_SIZE"] = local
    if "MASTER_ADDR" not in environment:
        if local == found["WORLD_SIZE"]:
            found["MASTER_ADDR"] = "127.0.0.1"
        elif launcher.name == "srun":
            nodes = environment.get("SLURM_STEP_NODELIST", "")
            first = re.match(r"([\w.-]+)(?:\[(\d+))?", nodes)  # `gpu01` of `gpu[01-03,7],cpu1`
            if not first:
                raise UserError(
                    f"SLURM_STEP_NODELIST={nodes}: not a list of nodes; set MASTER_ADDR to the host of rank 0."
                )
            found["MASTER_ADDR"] = first[1] + (first[2] or "")
        else:
            raise UserError("MASTER_ADDR: not set; add -x MASTER_ADDR=HOST, the host of rank 0, to mpirun.")
    job = environment.get(launcher.job, "")
    found["MASTER_PORT"] = environment.get("MASTER_PORT", str(PORTS[zlib.crc32(job.encode()) % len(PORTS)]))
    return found


def _number(environment: Mapping[str, str], name: str) -> int:
    if not re.fullmatch(r"\d{1,9}", environment[name]):
        raise UserError(f"{name}={environment[name]}: not a whole number; unset {name}, so that the launcher sets it.")
    return int(environment[name])


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]
