"""Optimizer time: the part of a step outside the passes, on the GPU, on the host and on its drives."""

import math

from ...hardware.cluster import Cluster
from ..constants import Constants
from ..training_setup import TrainingSetup
from . import communication

ADAM = 28
"""Bytes of GPU memory that Adam moves per updated fp32 parameter, as a single kernel: 12 + 4 read, 12 written."""
FOREACH = 3.0
"""Factor on these bytes if torch's Adam runs operation by operation, as without `fused`: 80 bytes in torch's own loop
and 84 in DeepSpeed's (torch 2.13)."""
ZERO_STEP, ZERO_STEP_BF16 = 44, 32
"""Bytes per parameter that the rest of DeepSpeed's step moves: the norm in fp64 18, clipping 8, gradients to fp32 10,
weights to bf16 6, and at ZeRO-1 and ZeRO-2 4 for the overflow check; with states in bf16 less is converted (deepspeed
0.19.8 on CPU ranks, by the operations that it calls, tests/workers/moved_bytes.py: 46 and 34 at ZeRO-1 and ZeRO-2, 42
and 30 at ZeRO-3)."""
CLIPPING = 12
"""The same without ZeRO: the norm of an fp32 gradient 4, and clipping 8 (counted likewise)."""
REDUCTION = 12
"""Bytes moved per trained parameter of a rank for each reduction of gradients, in addition to the collective: into the
bucket, into a flat copy, and the division by the number of ranks, each 2 + 2 (counted likewise, at every stage)."""
CPU_ADAM = 4e9 / 256
"""Parameters per second that DeepSpeed's CPU Adam updates, per GB/s of the host's memory bandwidth: ZeRO-Offload,
arXiv:2101.06840, table 4 (1 to 10 billion in 0.22 to 2.57 s), on two Xeon 8168 with six channels of DDR4-2666."""
CORE_ADAM = 0.88e9
"""The maximum of the same per core (deepspeed 0.19.8, a Xeon of 2023, one thread and two: 0.88 and 1.70 billion)."""
CPU_STEP = 2.2
"""Ratio of DeepSpeed's whole step on the host (norm, clipping, conversions and copies too) to Adam alone: 2.2 for Qwen2
72B on four nodes of A100s, 10 s (deepspeed issue 6834), and for Qwen2.5 3B on two (its pull request 7474, 2.38 s with
bound cores); 2.05 at ZeRO-2 and 1.93 at ZeRO-3 with 0.4 billion parameters on one rank with two threads (0.19.8)."""
SWAPPED = 32
"""Bytes per parameter to and from the drives in a step: fp32 weights, both moments and gradients, in each direction."""


def copy_seconds(trained: float, setup: TrainingSetup, cluster: Cluster, known: Constants) -> float:
    """Return the seconds in which a rank's gradients are copied and divided, over all reductions of a step."""
    micro_batches = setup.gradient_accumulation_steps
    reductions = (0, 1, micro_batches, micro_batches)[setup.zero_stage]
    return reductions * REDUCTION * trained / (cluster.gpu.memory_gbs * 1e9 * known.memory)


def launch_seconds(trained_weights: float, setup: TrainingSetup, known: Constants) -> float:
    """Return the seconds in which a rank's host launches the operations of an optimizer step."""
    return (known.step_sharded if setup.zero_stage == 3 else known.step) * trained_weights


def updated_bytes(setup: TrainingSetup) -> float:
    """Return the bytes that an optimizer step on the GPU moves per updated parameter of a rank."""
    width = 0.5 if setup.bf16_states else 1.0
    adam = width * ADAM * (FOREACH if setup.software.foreach_adam else 1.0)
    if setup.zero_stage == 0:
        return adam + width * CLIPPING
    return adam + (ZERO_STEP_BF16 if setup.bf16_states else ZERO_STEP)


def _host_adam(cluster: Cluster) -> float:
    """Return the parameters per second that Adam updates on a node's host; clouds count two threads per core."""
    if cluster.machine and (measured := cluster.machine.host_adam):
        return measured
    cores = cluster.cores / 2 or math.inf
    return min(CPU_ADAM * cluster.host_gbs, CORE_ADAM * cores)


def optimizer_seconds(
    parameters: float, updated: float, setup: TrainingSetup, cluster: Cluster, known: Constants
) -> tuple[float, float, float]:
    """Return the seconds of Adam, of transfers to and from the host, and of transfers to and from the drives."""
    own = updated / (setup.zero_ranks if setup.zero_stage else 1)
    ranks_per_node = min(cluster.gpus_per_node, setup.world_size)
    offload = nvme = 0.0
    if setup.offload_optimizer == "none":
        moved = own * updated_bytes(setup)
        adam = moved / (cluster.gpu.memory_gbs * 1e9 * known.memory)
    else:
        adam = CPU_STEP * own * ranks_per_node / _host_adam(cluster)
        # The gradients of every micro-batch go to the host, the weights come back.
        offload += communication.to_host(2 * own * (setup.gradient_accumulation_steps + 1), cluster, known)
    if setup.offload_optimizer == "nvme":
        nvme += own * ranks_per_node * SWAPPED / (cluster.nvme_gbs * 1e9)
    if setup.offload_parameters == "nvme":
        fetched = 2 * setup.weight_bytes * parameters / setup.zero_ranks * setup.gradient_accumulation_steps
        nvme += fetched * ranks_per_node / (cluster.nvme_gbs * 1e9)
    return adam, offload, nvme
