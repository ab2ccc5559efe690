"""Communication time: the duration of collectives over the links between ranks."""

from dataclasses import dataclass
from math import ceil

from ...hardware.cluster import Cluster
from ..constants import Constants

GB = 1e9


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: `size` ranks, each `stride` after the last, in the order of `layout.rank_position`."""

    size: int
    stride: int

    def per_node(self, cluster: Cluster) -> int:
        """Return how many of the ranks share a node."""
        return min(self.size, max(1, cluster.gpus_per_node // self.stride))

    def nodes(self, cluster: Cluster) -> int:
        """Return how many nodes the ranks span."""
        return ceil(self.size / self.per_node(cluster))


def _inside(cluster: Cluster, constants: Constants) -> float:
    """Return the bytes per second between two GPUs of a node, in one direction."""
    if cluster.gpu.link_gbs:
        return cluster.gpu.link_gbs * constants.link * GB
    return cluster.gpu.pcie_gbs * (constants.peer or constants.link) * GB


def _between(cluster: Cluster, constants: Constants) -> float:
    """Return the bytes per second between two nodes, in one direction."""
    return cluster.node_network_gbs * constants.network * GB


def gather(size: float, group: Group, cluster: Cluster, constants: Constants, count: float = 1) -> float:
    """Return the seconds of an all-gather that leaves `size` bytes on each rank, or of a reduce-scatter of that size.

    It runs in `count` parts, one after the other. Each rank receives the data that it does not hold. A node receives
    the data that none of its ranks holds, once for every group with ranks on it. The slower of the two links determines
    the time.
    """
    if group.size == 1 or not size:
        return 0.0
    here, nodes = group.per_node(cluster), group.nodes(cluster)
    inside = size * (group.size - 1) / group.size / _inside(cluster, constants) if here > 1 else 0.0
    groups = cluster.gpus_per_node / here
    between = size * (nodes - 1) / nodes * groups / _between(cluster, constants) if nodes > 1 else 0.0
    return max(inside, between) + constants.latency * nodes * count


def all_reduce(size: float, group: Group, cluster: Cluster, constants: Constants) -> float:
    """Return the seconds of an all-reduce: a reduce-scatter and an all-gather."""
    return 2 * gather(size, group, cluster, constants)


def all_to_all(size: float, group: Group, cluster: Cluster, constants: Constants) -> float:
    """Return the seconds in which each rank sends `size` bytes in equal parts to all ranks, including itself."""
    if group.size == 1 or not size:
        return 0.0
    here, nodes = group.per_node(cluster), group.nodes(cluster)
    inside = size * (here - 1) / group.size / _inside(cluster, constants)
    away = size * (group.size - here) / group.size * cluster.gpus_per_node
    return max(inside, away / _between(cluster, constants) if nodes > 1 else 0.0) + constants.latency * nodes


def send(size: float, group: Group, cluster: Cluster, constants: Constants) -> float:
    """Return the seconds in which every rank sends `size` bytes to the next rank of its group, over the slowest link.

    All ranks between two members of the group send across the same node boundary.
    """
    if group.size * group.stride <= cluster.gpus_per_node:
        return size / _inside(cluster, constants)
    ranks = min(group.stride, cluster.gpus_per_node)
    return size * ranks / _between(cluster, constants) + constants.latency


def to_host(size: float, cluster: Cluster, constants: Constants) -> float:
    """Return the seconds in which every GPU sends `size` bytes to its host, or receives them."""
    return size / (cluster.gpu.pcie_gbs * constants.link * GB)
