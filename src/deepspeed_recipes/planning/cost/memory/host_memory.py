"""Memory beside the GPUs: what a node's host memory and its NVMe drives have to hold."""

from collections.abc import Callable, Sequence

from ..training_setup import TrainingSetup
from . import activations
from .stage_shards import StageShard
from .states import WIDTH, Moment, States

PROCESS = 3 * 2**30
"""A rank's Python with its libraries and CUDA's part on the host: assumed, since nobody has run this on a GPU yet."""
SWAP_BUFFER = 5 * 10**8
"""Elements of pinned memory for weights on their way to NVMe: 5 buffers of 10^8 (deepspeed, offload_config.py)."""


def host_bytes(
    whole: StageShard,
    stages: Sequence[StageShard],
    setup: TrainingSetup,
    ranks_per_node: int,
    states: Callable[[StageShard, TrainingSetup, Moment], States],
) -> dict[str, float]:
    """Return the bytes that one node holds, by moment.

    Args:
        whole: the model without parallelism.
        stages: of the pipeline.
        setup: how the model is trained.
        ranks_per_node: how many share the node's memory.
        states: says what a rank holds of the states.
    """
    width, processes = WIDTH[setup.precision], ranks_per_node * PROCESS
    offloaded = ranks_per_node * max(_offloaded(shard, setup, states(shard, setup, "backward")) for shard in stages)
    if setup.activation_offloading:
        offloaded += ranks_per_node * max(activations.waiting_bytes(shard.layer_counts, setup) for shard in stages)
    # Below ZeRO-3 every rank reads what it is going to hold, where AutoTP splits it the whole model, and 4-bit weights
    # straight to the GPU; at stage 3 the first rank reads everything, and the others get their shards.
    read = width * whole.parameters
    if setup.quantized:
        read = 0.0
    elif setup.zero_stage < 3:
        largest = max(shard.parameters for shard in stages) if len(stages) > 1 else whole.parameters
        read = ranks_per_node * width * largest
    # The first rank gathers the weights, or the adapters.
    saved = width * whole.trained(setup)
    return {"loading": processes + read, "training": processes + offloaded, "saving": processes + offloaded + saved}


def _offloaded(shard: StageShard, setup: TrainingSetup, states: States) -> float:
    weights = WIDTH[setup.precision] * shard.parameters / setup.zero_ranks
    sub_group = 16.0 * setup.sub_group_size  # on their way to NVMe: one at a time, with its gradients
    optimizer = {"none": 0.0, "cpu": states.host, "nvme": min(sub_group, states.host)}
    parameters = {"none": 0.0, "cpu": weights, "nvme": float(WIDTH[setup.precision] * SWAP_BUFFER)}
    return optimizer[setup.offload_optimizer] + parameters[setup.offload_parameters]


def nvme_bytes(shard: StageShard, setup: TrainingSetup) -> float:
    """Return the bytes that one rank has on NVMe: fp32 weights with Adam's moments, and the weights themselves."""
    states = 12 * shard.trained(setup) / setup.zero_ranks if setup.offload_optimizer == "nvme" else 0.0
    weights = WIDTH[setup.precision] * shard.parameters / setup.zero_ranks
    return states + (weights if setup.offload_parameters == "nvme" else 0.0)
