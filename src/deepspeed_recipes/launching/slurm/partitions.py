"""The partitions of a SLURM cluster, and the allocation that a run requests from it."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from ...recipe.errors import UserError
from ..options import Allocation


@dataclass(frozen=True)
class Partition:
    """A partition of the cluster."""

    name: str
    nodes: int
    gpus: int
    """Number of GPUs on the node with the fewest."""


def partitions(listing: str) -> Iterator[Partition]:
    """Yield the partitions in the output of `sinfo -h -o '%P|%D|%G'`, the default partition first."""
    found: dict[str, list[tuple[int, int]]] = {}
    for line in listing.split():
        name, nodes, resources = line.split("|")
        # gpu:8, gpu:h100:8(S:0-1), gpu:a100:4,gpu:h100:4; commas also separate other resources.
        gpus = sum(int(count) for count in re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", resources))
        found.setdefault(name, []).append((int(nodes), gpus))
    for name in sorted(found, key=lambda name: not name.endswith("*")):
        kinds = found[name]
        yield Partition(name.rstrip("*"), sum(nodes for nodes, _ in kinds), min(gpus for _, gpus in kinds))


def allocation(
    name: str, nodes: int | None, ranks: int | None, partition: str | None, limit: str | None, dry_run: bool
) -> Allocation:
    """Return the allocation to request from the cluster.

    Raises:
        UserError: SLURM is not installed, no such partition, too many nodes or GPUs, or an invalid time limit.
    """
    # https://slurm.schedmd.com/sbatch.html#OPT_time: minutes, minutes:seconds, hours:..., days-hours...
    if limit is not None and not re.fullmatch(r"(\d+-\d+(:\d+){0,2}|\d+(:\d+){0,2})", limit):
        raise UserError(f"--time: invalid time limit {limit}; write minutes, hours:minutes:seconds or days-hours.")
    if partition is not None and not re.fullmatch(r"[\w.,-]+", partition):
        raise UserError(f"--partition {partition!r}: not a partition's name.")
    nodes = 1 if nodes is None else nodes
    if nodes < 1 or (ranks is not None and ranks < 1):
        raise UserError("--nodes and --gpus must be at least 1.")
    known = _partitions_here(dry_run)
    if known is None:
        return Allocation(name, nodes, ranks or 1, True, partition, limit)
    wanted = next((one for one in known if partition in (None, one.name)), None)
    if wanted is None:
        names = ", ".join(one.name for one in known) or "none"
        raise UserError(f"--partition {partition}: no such partition; this cluster has {names}.")
    if nodes > wanted.nodes:
        raise UserError(f"--nodes {nodes}: partition {wanted.name} has only {wanted.nodes}.")
    if wanted.gpus and ranks and ranks > wanted.gpus:
        raise UserError(f"--gpus {ranks}: nodes in partition {wanted.name} have only {wanted.gpus}.")
    return Allocation(name, nodes, ranks or wanted.gpus or 2, wanted.gpus > 0, partition, limit)


def _partitions_here(dry_run: bool) -> list[Partition] | None:
    """Return this cluster's partitions, or None in a dry run without a cluster."""
    if not shutil.which("sinfo") or not shutil.which("sbatch"):
        if dry_run:
            return None
        raise UserError("--slurm: sbatch is not installed here; use a login node, or --dry-run to print the script.")
    try:
        return list(partitions(ask("sinfo", "-h", "-o", "%P|%D|%G")))
    except UserError:
        if dry_run:
            return None
        raise


def ask(*command: str) -> str:
    """Return the output of a SLURM command.

    Raises:
        UserError: the command fails; quotes its last line.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["failed"])[-1]
        raise UserError(f"{command[0]}: {last.removeprefix(f'{command[0]}: ')}")
    return done.stdout
