"""The machines of a run: this machine, the hosts of a hostfile, or the nodes of a cluster."""

from dataclasses import dataclass, replace

from ...launching import scheduler
from ...launching.command import rank_count, visible_gpus
from ...launching.options import Allocation, LaunchOptions
from ...launching.ray import cluster as ray_cluster
from ...launching.ray.cluster import RayCluster
from ...launching.ssh import hostfile
from ...launching.ssh.hostfile import HostPool
from ...planning.hardware.cluster import Cluster
from ...planning.search import forecast


@dataclass(frozen=True)
class Machines:
    """The machines of a run: only this machine without a pool, Ray cluster or allocation, unless with --prepare."""

    pool: HostPool | None
    cluster: RayCluster | None
    allocation: Allocation | None
    gpus: int
    """GPUs of this machine, which may not be part of the run."""
    ranks: int
    ranks_each: int
    """Largest number of ranks on a machine."""
    hardware: Cluster | None
    """The hardware for the planner, or None if it is unknown or the hosts differ."""

    @property
    def reserved(self) -> bool:
        """True if a hostfile, a Ray cluster or a scheduler determines the machines."""
        return bool(self.pool or self.cluster or self.allocation)

    @property
    def elsewhere(self) -> bool:
        """True if this machine may have no ranks."""
        return bool(self.pool or self.allocation or (self.cluster and self.cluster.nodes))


def machines_of(options: LaunchOptions, name: str) -> Machines:
    """Return the machines on which the ranks of the run `name` start.

    Raises:
        UserError: the hostfile or the selection is wrong, or a cluster does not answer or has too few GPUs.
    """
    pool = None
    if options.hostfile:
        pool = hostfile.read(options.hostfile, options.include, options.exclude, options.nodes, options.gpus)
    gpus, nodes = visible_gpus(), options.nodes or 1
    cluster, allocation = ray_cluster.of(options), scheduler.allocation_of(options, name)
    if reserved := pool or cluster or allocation:
        ranks = reserved.ranks
    else:  # prepared ranks start on other machines
        ranks = rank_count(options.gpus, 0 if options.prepare else gpus) * nodes
    counted = pool or cluster
    ranks_each = counted.most_ranks if counted else ranks // nodes
    machines = Machines(pool, cluster, allocation, gpus, ranks, ranks_each, hardware=None)
    if not gpus or options.prepare or (machines.elsewhere and not pool):
        return machines
    return replace(machines, hardware=hardware_of(pool, ranks))


def hardware_of(pool: HostPool | None, ranks: int) -> Cluster | None:
    """Return the hardware for the planner: this machine or equal hosts, or None if the hosts differ."""
    if pool is None:
        return forecast.machines(ranks)
    equal = pool.ranks == pool.most_ranks * len(pool.hosts)
    return forecast.machines(pool.most_ranks, len(pool.hosts)) if equal else None
