"""Host memory and NVMe space that a node needs."""

from collections.abc import Callable, Sequence

from ..training_setup import TrainingSetup
from . import activations
from .stage_shards import StageShard
from .states import WIDTH, Moment, States

PROCESS = 3 * 2**30
"""Host memory of a rank's Python process with its libraries and CUDA's host part. Assumed, not measured."""
SWAP_BUFFER = 5 * 10**8
"""Elements in pinned memory through which weights are swapped to NVMe: 5 buffers of 10^8 (deepspeed,
offload_config.py)."""


def host_bytes(
    whole: StageShard,
    stages: Sequence[StageShard],
    setup: TrainingSetup,
    ranks_per_node: int,
    states: Callable[[StageShard, TrainingSetup, Moment], States],
) -> dict[str, float]:
    """Return the bytes of host memory that one node needs, by moment.

    Args:
        whole: the model without parallelism.
        stages: the pipeline's stages.
        setup: the training setup.
        ranks_per_node: number of ranks that share the node's memory.
        states: returns the model states on one rank.
    """
    width, processes = WIDTH[setup.precision], ranks_per_node * PROCESS
    offloaded = ranks_per_node * max(_offloaded(shard, setup, states(shard, setup, "backward")) for shard in stages)
    if setup.activation_offloading:
        offloaded += ranks_per_node * max(activations.waiting_bytes(shard.layer_counts, setup) for shard in stages)
    # Below ZeRO-3 every rank reads the weights that it will hold (with AutoTP, the whole model), and 4-bit weights go
    # straight to the GPU. At stage 3 the first rank reads everything and sends the others their shards.
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
    sub_group = 16.0 * setup.sub_group_size  # only one group at a time is in memory, with its gradients
    optimizer = {"none": 0.0, "cpu": states.host, "nvme": min(sub_group, states.host)}
    parameters = {"none": 0.0, "cpu": weights, "nvme": float(WIDTH[setup.precision] * SWAP_BUFFER)}
    return optimizer[setup.offload_optimizer] + parameters[setup.offload_parameters]


def nvme_bytes(shard: StageShard, setup: TrainingSetup) -> float:
    """Return one rank's bytes on NVMe: fp32 weights and Adam's moments, and the weights themselves, if offloaded."""
    states = 12 * shard.trained(setup) / setup.zero_ranks if setup.offload_optimizer == "nvme" else 0.0
    weights = WIDTH[setup.precision] * shard.parameters / setup.zero_ranks
    return states + (weights if setup.offload_parameters == "nvme" else 0.0)
