"""Memory of a run: by component at each moment on the fullest GPU, and in total on a node's host, NVMe and disk."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

from ...recipe.files import Json
from ...recipe.recipe import Layout
from ...recipe.run_folder import checkpoint_bytes
from ..hardware.cluster import Cluster
from ..model_profile.profile import ModelProfile
from . import activations, weights
from .states import ADAM_MOMENTS, EIGHT_BIT, WIDTH, Moment, States, mixture_bytes, muon_bytes, state_bytes
from .training_setup import TrainingSetup
from .weights import StageShard, stage_shards

PROCESS = 3 * 2**30
"""Host memory of a rank's Python process with its libraries and CUDA's host part. Assumed, not measured."""
SWAP_BUFFER = 5 * 10**8
"""Elements in pinned memory through which weights are swapped to NVMe: 5 buffers of 10^8 (deepspeed,
offload_config.py)."""


def host_bytes(
    whole: StageShard, stages: Sequence[StageShard], setup: TrainingSetup, ranks_per_node: int
) -> dict[str, float]:
    """Return the bytes of host memory that one node needs, by moment; `whole` is the model without parallelism."""
    width, processes = WIDTH[setup.precision], ranks_per_node * PROCESS
    offloaded = ranks_per_node * max(_offloaded(shard, setup, states(shard, setup, "backward")) for shard in stages)
    if setup.activation_offloading:
        offloaded += ranks_per_node * max(_kept_bytes(shard, setup) for shard in stages)
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


# The constants below are from documentation and publications, not from this project's own measurements.
CONTEXT = 1.343e9
"""CUDA's context with PyTorch's kernels, as measured in Hugging Face's documentation (transformers, "Model training
anatomy": 1,343 MB with a tensor of one number)."""
CUBLAS = 64 * 2**20
"""cuBLAS' workspaces: two of 32 MiB (pytorch/pytorch#144397)."""
NCCL = 2**30
"""Buffers of a process group, outside PyTorch's allocator: up to "a few GB" with many groups, in the same thread."""
FRAGMENTATION = 0.07
"""Memory that PyTorch reserves beyond its allocations, as a share of them. Fitted on published rows
(scripts/maintain/calibration)."""
FRAGMENTATION_LEAST = 0.02
"""What remains of it on a full GPU, where PyTorch releases the blocks that it caches before it gives up. Assumed."""
FRAGMENTATION_SHARDED = 0.2
"""Additional fragmentation under ZeRO-3 and FSDP, as a share of the states: gathered weights come and go in blocks of
all sizes, on a separate stream, and a step copies gradients in groups, even on a single rank. It does not apply to one
GPU with the optimizer on the host. Fitted."""
ALL_REDUCE = 5 * 10**8
"""Gradients, as a number of elements, that are copied into one buffer to be reduced without ZeRO (deepspeed,
runtime/engine.py, MEMORY_OPT_ALLREDUCE_SIZE)."""
ON_THEIR_WAY = 5
"""Layers whose offloaded inputs are still on the GPU, because they are being copied (trl, `OffloadActivations`)."""
MUON_BUFFERS = 2**28
"""Bytes of gathered gradients and momenta that ZeRO-3 keeps for Muon's next step (deepspeed, stage3.py,
`_muon_allgather_max_cached_bytes`)."""


@dataclass(frozen=True)
class GpuMoment:
    """Bytes on one GPU at one moment."""

    moment: str
    """`loading`, `rollout` (for methods that learn from the model's own answers), `loss`, `backward` (the start of the
    backward pass), `gradients` (its end), `step` or `saving`."""
    components: Mapping[str, float]
    """Bytes by purpose; nothing is counted twice."""

    @cached_property
    def total(self) -> float:
        """Sum of all components."""
        return sum(self.components.values())


@dataclass(frozen=True)
class Memory:
    """Memory that a plan needs, in bytes."""

    moments: tuple[GpuMoment, ...]
    """Moments of the fullest GPU, in the order of a run."""
    host: Mapping[str, float]
    """Host memory of one node, by moment."""
    nvme: float
    """NVMe space of one node."""
    checkpoint: int
    """Disk space of one checkpoint."""

    @property
    def worst(self) -> GpuMoment:
        """The moment at which the fullest GPU needs most."""
        return max(self.moments, key=lambda moment: moment.total)


def peak_memory(profile: ModelProfile, setup: TrainingSetup, cluster: Cluster) -> Memory:
    """Return the memory of training on the fullest GPU, on a node's host and NVMe drives, and on disk per checkpoint.

    The profile includes the setup's training mode; of the cluster only the GPUs per node and their memory matter.
    """
    stages = stage_shards(profile, setup)
    room = cluster.gpu.memory_gib * 2**30
    first: dict[object, int] = {}  # of each group of equal stages: later ones have fewer micro-batches in flight
    for index, shard in enumerate(stages):
        counts = tuple((id(kind), count) for kind, count in shard.layer_counts)
        held = (counts, id(shard.layers[0]), shard.parameters, shard.largest_module, shard.is_last)
        first.setdefault(held, index)
    moments = {stage: gpu_moments(profile, stages[stage], setup, room) for stage in first.values()}
    fullest = max(moments, key=lambda stage: max(moment.total for moment in moments[stage]))
    ranks_per_node = min(cluster.gpus_per_node, setup.world_size)
    whole = stage_shards(profile, setup, Layout())[0]
    return Memory(
        moments=moments[fullest],
        host=host_bytes(whole, stages, setup, ranks_per_node),
        nvme=ranks_per_node * max(nvme_bytes(shard, setup) for shard in stages),
        checkpoint=checkpoint_bytes(
            int(whole.parameters + whole.adapter_parameters), int(whole.trained(setup)), WIDTH[setup.precision]
        ),
    )


def gpu_moments(
    profile: ModelProfile, shard: StageShard, setup: TrainingSetup, room: float = math.inf
) -> tuple[GpuMoment, ...]:
    """Return the memory on a GPU of one pipeline stage at each moment of a run; `room` is the GPU's memory in bytes."""
    kinds = [kind for kind, _ in shard.layer_counts]
    kept = _kept_bytes(shard, setup)
    if setup.activation_offloading:
        kept = min(kept, ON_THEIR_WAY * max(activations.kept_bytes(kind, setup) for kind in kinds))
    waiting = shard.micro_batches_in_flight * kept + activations.mask_bytes(kinds, setup)
    backward = max(activations.backward_bytes(kind, setup) for kind in kinds)
    first = activations.kept_bytes(shard.layers[0], setup) + activations.backward_bytes(shard.layers[0], setup)
    loss = activations.loss_bytes(profile, setup) if shard.is_last else 0.0
    between_passes = gathered = weights.gathered(shard, setup)
    if setup.gathers:  # between the forward and the backward pass
        kept_whole = min(WIDTH[setup.precision] * setup.kept_weights, weights.loaded_bytes(shard, setup))
        between_passes = max(gathered + weights.held_by_autograd(shard.expert_parameters, setup), kept_whole)
    held = weights.held_by_autograd(shard.layers[0].expert_parameters, setup)
    permanent_buckets, reduce_buckets = _buckets(shard, setup)
    layout = setup.layout  # each kind of parallelism has process groups in addition to that of all ranks
    groups = 1 + sum(size > 1 for size in (layout.tensor, layout.pipeline, layout.sequence, layout.expert))

    def at(moment: str, states: Mapping[str, float], unusable: float = 0.0, **more: float) -> GpuMoment:
        allocated = {**states, **more} | ({"teacher": teacher} if (teacher := weights.teacher_bytes(setup)) else {})
        allocated |= {"vision_tower": tower} if (tower := weights.tower_bytes(profile, setup)) else {}
        runtime = CONTEXT + CUBLAS + (groups * NCCL if setup.world_size > 1 and moment != "loading" else 0)
        alone = setup.zero_ranks == 1 and setup.offload_optimizer != "none"
        sharded = setup.zero_stage == 3 and not alone and moment != "loading"
        # While weights load, each is allocated once and nothing is released in between.
        fragmentation = FRAGMENTATION * sum(allocated.values()) + unusable if moment != "loading" else 0.0
        used = sum(allocated.values()) + (pieces := FRAGMENTATION_SHARDED * sum(states.values()) if sharded else 0.0)
        fragmentation = max(min(fragmentation, room - used - runtime), min(fragmentation, FRAGMENTATION_LEAST * used))
        fragmentation += pieces
        return GpuMoment(moment, {**allocated, "runtime": runtime, "fragmentation": fragmentation})

    forward, backwards, step = (held_bytes(shard, setup, moment) for moment in get_args(Moment))
    unusable = activations.unusable_logits_bytes(profile, setup) if shard.is_last else 0.0
    found = [at("loading", weights.loading(shard, setup))]
    if setup.rollout_answers:  # their keys and values, at full length; linear attention's small state is not counted
        tokens = WIDTH[setup.precision] * setup.rollout_answers * setup.sequence_length
        cache = tokens * sum(count * profile.cached_per_token(kind) for kind, count in shard.layer_counts)
        whole = gathered
        if setup.zero_stage == 3 and setup.rollout_gathers:  # beyond a rank's shards
            whole = max(whole, WIDTH[setup.precision] * shard.parameters * (1 - 1 / setup.zero_ranks))
        found.append(at("rollout", forward, key_value_cache=cache, live_parameters=whole))
    live, buckets = {"live_parameters": between_passes}, permanent_buckets
    everything = reduce_buckets
    if setup.zero_ranks > 1 and _is_unbucketed(setup):  # a copy is reduced after the backward pass
        width = 4 if setup.fp32_accumulation else WIDTH[setup.precision]
        everything += min(shard.trained(setup), ALL_REDUCE) * width
    return (
        *found,
        at("loss", forward, unusable, activations=waiting, logits=loss, buckets=buckets, **live),
        at("backward", forward, activations=waiting + backward, buckets=reduce_buckets, **live),
        at("gradients", backwards, activations=first, live_parameters=gathered + held, buckets=everything),
        at("step", step, buckets=buckets),
        at("saving", forward, live_parameters=gathered, buckets=buckets),
    )


def _kept_bytes(shard: StageShard, setup: TrainingSetup) -> float:
    """Return the bytes kept of a micro-batch after its forward pass, on the GPU or offloaded."""
    return sum(count * activations.kept_bytes(kind, setup) for kind, count in shard.layer_counts)


def held_bytes(shard: StageShard, setup: TrainingSetup, moment: Moment) -> dict[str, float]:
    """Return the bytes of model states on a GPU; all states of adapters are one component."""
    found = states(shard, setup, moment)
    frozen, share = 0.0, 1 if setup.lora else 1 - setup.trained_share + setup.reference
    if share:
        frozen = share * weights.loaded_bytes(shard, setup) / (setup.zero_ranks if setup.zero_stage == 3 else 1)
    second = WIDTH[setup.precision] * shard.parameters / setup.partition_size if setup.partition_size > 1 else 0.0
    on_gpu = setup.offload_parameters == "none"
    if setup.lora:
        adapters = found.gradients + found.optimizer + (found.parameters if on_gpu else 0)
        return {"parameters": (frozen if on_gpu else 0) + second, "adapters": adapters}
    parameters = (found.parameters + frozen if on_gpu else 0) + second
    return {"parameters": parameters, "gradients": found.gradients, "optimizer": found.optimizer}


def states(shard: StageShard, setup: TrainingSetup, moment: Moment) -> States:
    """Return the states of the trained parameters on one rank of a pipeline stage, including those on the host."""
    sharding = (setup.zero_stage, setup.zero_ranks, setup.precision)
    moments = EIGHT_BIT if setup.optimizer == "adamw_8bit" else ADAM_MOMENTS
    if setup.optimizer == "muon":  # for matrices only
        matrices = shard.linear_parameters / shard.parameters
        moments = matrices * muon_bytes(setup.zero_stage, setup.precision) + (1 - matrices) * ADAM_MOMENTS
    options: Json = {
        "offload": setup.offload_optimizer != "none",
        "gradient_accumulation_steps": setup.gradient_accumulation_steps,
        "moment": moment,
        "fp32_accumulation": setup.fp32_accumulation,
        "bf16_states": setup.bf16_states,
        "sub_group": setup.sub_group_size,
        "moments": moments,
        "foreach": setup.software.foreach_adam,
    }
    if setup.layout.expert > 1 and setup.lora is None:
        dense = shard.parameters - shard.expert_parameters
        return mixture_bytes(dense, shard.expert_parameters, *sharding, setup.layout.expert, **options)
    trained = shard.trained(setup)
    return state_bytes(trained, trained, *sharding, **options)


def _buckets(shard: StageShard, setup: TrainingSetup) -> tuple[float, float]:
    """Return the bytes of the gradient buckets: those that always exist, and those during reduction."""
    size = setup.reduced(shard.hidden_size)
    one = size * (4 if setup.fp32_accumulation else WIDTH[setup.precision])
    if setup.zero_stage == 3:
        kept = one + (MUON_BUFFERS if setup.optimizer == "muon" else 0)
        return kept, kept + one  # the buffer, and a copy in the order of the ranks
    if _is_unbucketed(setup):
        return 0.0, 0.0
    # With several ranks a flat copy is reduced (deepspeed, stage_1_and_2.py, `allreduce_bucket`).
    trained = shard.trained(setup)
    flat = min(1.0, trained / size) if setup.zero_ranks > 1 else 0.0
    return 0.0, one * ((2 if setup.overlap_comm else 1) + flat)


def _is_unbucketed(setup: TrainingSetup) -> bool:
    return setup.zero_stage == 0 or (setup.zero_stage == 1 and setup.fp32_accumulation)
