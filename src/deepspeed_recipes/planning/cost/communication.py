"""Collectives: their duration over the links between ranks, and the bytes that ZeRO sends in a step."""

from dataclasses import dataclass, replace
from math import ceil

from ...recipe.deepspeed_file import KEPT_WEIGHTS
from ...recipe.files import JsonView
from ...recipe.layout import rank_position
from ...recipe.recipe import Layout
from ..hardware.cluster import Cluster
from .constants import Constants


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


def _links(cluster: Cluster, constants: Constants) -> tuple[float, float]:
    """Return the bytes per second between two GPUs of a node, and between two nodes, in one direction."""
    inside = cluster.gpu.link_gbs * constants.link or cluster.gpu.pcie_gbs * (constants.peer or constants.link)
    return 1e9 * inside, 1e9 * cluster.node_network_gbs * constants.network


def gather(size: float, group: Group, cluster: Cluster, constants: Constants, count: float = 1) -> float:
    """Return the seconds of an all-gather that leaves `size` bytes on each rank, or of a reduce-scatter of that size.

    An all-reduce is both. It runs in `count` parts, one after the other. Each rank receives the data that it does not
    hold. A node receives the data that none of its ranks holds, once for every group with ranks on it. The slower of
    the two links determines the time.
    """
    if group.size == 1 or not size:
        return 0.0
    here, nodes, (inside, between) = group.per_node(cluster), group.nodes(cluster), _links(cluster, constants)
    seconds = size * (group.size - 1) / group.size / inside if here > 1 else 0.0
    if nodes > 1:
        seconds = max(seconds, size * (nodes - 1) / nodes * cluster.gpus_per_node / here / between)
    return seconds + constants.latency * nodes * count


def all_to_all(size: float, group: Group, cluster: Cluster, constants: Constants, count: float = 1) -> float:
    """Return the seconds in which each rank sends `size` bytes in equal parts to all ranks, in `count` exchanges."""
    if group.size == 1 or not size:
        return 0.0
    here, nodes, (inside, between) = group.per_node(cluster), group.nodes(cluster), _links(cluster, constants)
    seconds = size * (here - 1) / group.size / inside
    if nodes > 1:
        seconds = max(seconds, size * (group.size - here) / group.size * cluster.gpus_per_node / between)
    return seconds + constants.latency * nodes * count


def send(size: float, group: Group, cluster: Cluster, constants: Constants) -> float:
    """Return the seconds in which every rank sends `size` bytes to the next rank of its group, over the slowest link.

    All ranks between two members of the group send across the same node boundary.
    """
    inside, between = _links(cluster, constants)
    if group.size * group.stride <= cluster.gpus_per_node:
        return size / inside
    return size * min(group.stride, cluster.gpus_per_node) / between + constants.latency


def to_host(size: float, cluster: Cluster, constants: Constants) -> float:
    """Return the seconds in which every GPU sends `size` bytes to its host, or receives them; a CPU rank copies."""
    rate = cluster.gpu.memory_gbs if constants.cpu else cluster.gpu.pcie_gbs * constants.link
    return size / (rate * 1e9)


def zero_traffic(
    stage: int, total: int, trained: int, weight_bytes: int, micro_batches: int, kept: int = KEPT_WEIGHTS
) -> dict[str, int]:
    """Return the bytes of a step's whole messages by kind, such as the output of an all-gather on each rank.

    The ranks hold `total` parameters together, of which `trained` are trained, and `weight_bytes` for each parameter
    and gradient; ZeRO-3 keeps `kept` weights whole from the forward to the backward pass
    (`DeepSpeedFile.kept_weights`). Small weights that it keeps on every rank, and norms, are not included: below 1 %.
    """
    gradients = trained * weight_bytes
    if stage == 0:
        return {"all-reduce": gradients}
    if stage < 3:
        # Gradients are averaged by all-reduces; at stage 1 once, after the last micro-batch.
        return {"all-reduce": gradients * (micro_batches if stage == 2 else 1), "all-gather": gradients}
    gathered = (total + max(0, total - kept)) * weight_bytes * micro_batches
    return {"all-gather": gathered, "reduce-scatter": gradients * micro_batches}


def traffic_of_run(about: JsonView) -> dict[tuple[str, tuple[int, ...]], int]:
    """Return the same by kind and process group for a run, from the `about` of its trace.

    Empty if stages or experts are split. Activations that tensor parallelism sends are not included, since they depend
    on the sequence lengths.
    """
    layout, rank = Layout(**about.get("layout", {})), about.get("rank", 0)
    world_size, stage = about.get("world_size", 1), about.get("stage", 0)
    parts = [replace(rank_position(layout, one, world_size), data=0, sequence=0) for one in range(world_size)]
    group = tuple(one for one in range(world_size) if parts[one] == parts[rank])  # ZeRO shards their part of the model
    if len(group) == 1 or layout.pipeline > 1 or layout.expert > 1:
        return {}
    held, width, kept = about["held"], about["weight_bytes"], about.get("kept_weights", KEPT_WEIGHTS)
    sent = zero_traffic(stage, held["total"], held["trained"], width, about["micro_batches"], kept)
    found = {(kind, group): size for kind, size in sent.items()}
    near = about.get("partition_size", 1)
    if stage == 3 and 1 < near < len(group):
        # Except for the first gather after an update, all weights are in the second copy that these ranks share.
        far, first = held["total"] * width, rank // near * near
        found["all-gather", group] = far
        found["all-gather", tuple(range(first, first + near))] = sent["all-gather"] - far
    return {key: size for key, size in found.items() if size}
