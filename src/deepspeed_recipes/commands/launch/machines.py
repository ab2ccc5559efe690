"""Where a run's ranks start: on this machine, on the hosts of a hostfile, or on what a cluster gives."""

import argparse
from dataclasses import dataclass, replace

from ...launching import scheduler
from ...launching.command import rank_count, visible_gpus
from ...launching.ray import cluster as ray_cluster
from ...launching.ray.cluster import RayCluster
from ...launching.ssh import hostfile
from ...launching.ssh.hostfile import HostPool
from ...planning.hardware.cluster import Cluster
from ...planning.search import forecast
from ...recipe.recipe import Recipe


@dataclass(frozen=True)
class Machines:
    """The machines of a run; without a pool, a Ray cluster or an allocation only this one, unless it is prepared."""

    pool: HostPool | None
    cluster: RayCluster | None
    allocation: scheduler.Allocation | None
    gpus: int
    """Of this machine, which may have no part in the run."""
    ranks: int
    ranks_each: int
    """Of the machine that has most."""
    hardware: Cluster | None
    """For the planner; None: not known, or hosts that differ."""

    @property
    def reserved(self) -> bool:
        """Whether something else than this command decides which machines there are."""
        return bool(self.pool or self.cluster or self.allocation)

    @property
    def elsewhere(self) -> bool:
        """Whether this machine may have no ranks."""
        return bool(self.pool or self.allocation or (self.cluster and self.cluster.nodes))


def machines_of(options: argparse.Namespace, recipe: Recipe, pool: HostPool | None) -> Machines:
    """Return where the ranks start.

    Raises:
        UserError: a cluster that does not answer, or that has too little.
    """
    gpus, nodes = visible_gpus(), options.nodes or 1
    cluster, allocation = ray_cluster.of(options), scheduler.allocation_of(options, recipe)
    if reserved := pool or cluster or allocation:
        ranks = reserved.ranks
    else:  # prepared ranks start on other machines
        ranks = rank_count(options.gpus, 0 if options.prepare else gpus) * nodes
    counted = pool or cluster
    machines = Machines(
        pool=pool,
        cluster=cluster,
        allocation=allocation,
        gpus=gpus,
        ranks=ranks,
        ranks_each=counted.most_ranks if counted else ranks // nodes,
        hardware=None,
    )
    if not gpus or options.prepare or (machines.elsewhere and not pool):
        return machines
    return replace(machines, hardware=hardware_of(pool, ranks))


def pool_of(options: argparse.Namespace) -> HostPool | None:
    """Return the selected hosts; None: no hostfile.

    Raises:
        UserError: the hostfile or the selection is wrong.
    """
    if not options.hostfile:
        return None
    return hostfile.read(options.hostfile, options.include, options.exclude, options.nodes, options.gpus)


def hardware_of(pool: HostPool | None, ranks: int) -> Cluster | None:
    """Return the hardware for the planner: this machine, or hosts like it; None if the hosts differ."""
    if pool is None:
        return forecast.machines(ranks)
    equal = pool.ranks == pool.most_ranks * len(pool.hosts)
    return forecast.machines(pool.most_ranks, len(pool.hosts)) if equal else None
