"""Memory of a run: by component at each moment on the fullest GPU, and in total on a node's host, NVMe and disk."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

from ...recipe.gpus import GIB
from ...recipe.recipe import Layout
from ...recipe.run_folder import checkpoint_bytes
from ..hardware.cluster import Cluster
from ..model_profile.profile import ModelProfile
from . import activations, states
from .constants import COUNTS
from .states import WIDTH, Moment, StageShard, stage_shards
from .training_setup import TrainingSetup

Components = Mapping[str, float]
"""Bytes on a GPU by purpose; nothing is counted twice."""


@dataclass(frozen=True)
class Memory:
    """Memory that a plan needs."""

    moments: Mapping[str, Components]
    """On the fullest GPU, in the order of a run: `loading`, `rollout` (for methods that learn from the model's own
    answers), `loss`, `backward` (the start of the backward pass), `gradients` (its end), `step`."""
    host_gib: float
    """Host memory of one node at its fullest moment."""
    nvme_gib: float
    """NVMe space of one node."""
    checkpoint_gib: float
    """Disk space of one checkpoint."""

    @cached_property
    def worst(self) -> str:
        """The moment at which the fullest GPU needs most."""
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def components(self) -> Components:
        """The components of that moment."""
        return self.moments[self.worst]

    @cached_property
    def gpu(self) -> float:
        """Their sum."""
        return sum(self.components.values())


def peak_memory(profile: ModelProfile, setup: TrainingSetup, cluster: Cluster) -> Memory:
    """Return the memory of training on the fullest GPU, on a node's host and NVMe drives, and on disk per checkpoint.

    The profile includes the setup's training mode; of the cluster only the GPUs per node and their memory matter.
    """
    stages, ranks_per_node = stage_shards(profile, setup), min(cluster.gpus_per_node, setup.world_size)
    room = cluster.gpu.memory_gib * GIB
    moments = (_gpu_moments(profile, shard, setup, room) for shard in {id(shard): shard for shard in stages}.values())
    width, processes = WIDTH[setup.precision], ranks_per_node * COUNTS.process
    on_host, on_nvme = [], []  # a rank's offloaded states and weights, by stage
    for shard in stages:
        parameters = width * shard.parameters / setup.zero_ranks
        held = states.of_stage(shard, setup, "backward").host
        one_group = 16.0 * setup.sub_group_size  # in memory with its gradients, if the states are on NVMe
        own = {"none": 0.0, "cpu": held, "nvme": min(one_group, held)}[setup.offload_optimizer]
        buffer = width * max(COUNTS.swap_buffer, 5 * shard.largest_module / setup.zero_ranks)
        on_host.append(own + {"none": 0.0, "cpu": parameters, "nvme": buffer}[setup.offload_parameters])
        # Fp32 weights and Adam's moments.
        swapped = 12 * shard.trained(setup) / setup.zero_ranks if setup.offload_optimizer == "nvme" else 0.0
        on_nvme.append(swapped + (parameters if setup.offload_parameters == "nvme" else 0.0))
    host = ranks_per_node * max(on_host)
    if setup.activation_offloading:
        host += ranks_per_node * max(_kept_bytes(shard, setup) for shard in stages)
    whole = stage_shards(profile, setup, Layout())[0]
    # Below ZeRO-3 every rank reads the weights that it will hold (with AutoTP, the whole model), and 4-bit weights go
    # straight to the GPU. At stage 3 the first rank reads everything and sends the others their shards.
    read = 0.0 if setup.quantized else width * whole.parameters
    if setup.zero_stage < 3:
        largest = max(shard.parameters for shard in stages) / whole.parameters if len(stages) > 1 else 1
        read *= ranks_per_node * largest
    saved = width * whole.trained(setup)  # the first rank gathers the weights, or the adapters
    checkpoint = checkpoint_bytes(int(whole.parameters + whole.adapter_parameters), int(whole.trained(setup)), width)
    return Memory(
        moments=max(moments, key=lambda found: max(sum(one.values()) for one in found.values())),
        host_gib=max(processes + read, processes + host + saved) / GIB,  # while weights are loaded, or saved
        nvme_gib=ranks_per_node * max(on_nvme) / GIB,
        checkpoint_gib=checkpoint / GIB,
    )


def _gpu_moments(profile: ModelProfile, shard: StageShard, setup: TrainingSetup, room: float) -> dict[str, Components]:
    """Return the memory on a GPU of one pipeline stage at each moment of a run; `room` is the GPU's memory in bytes."""
    kinds, width = [kind for kind, _ in shard.layer_counts], WIDTH[setup.precision]
    kept = _kept_bytes(shard, setup)
    if setup.activation_offloading:
        kept = min(kept, COUNTS.on_their_way * max(activations.kept_bytes(kind, setup) for kind in kinds))
    waiting = shard.micro_batches_in_flight * kept + activations.mask_bytes(kinds, setup)
    peaks = [activations.backward_bytes(kind, setup) for kind in kinds]
    first = activations.kept_bytes(kinds[0], setup) + peaks[0]
    loss, unusable = activations.loss_bytes(profile, setup) if shard.is_last else (0.0, 0.0)
    between_passes = gathered = states.gathered_bytes(shard, setup)
    if setup.gathers:  # between the forward and the backward pass
        kept_whole = min(width * setup.kept_weights, states.loaded_bytes(shard, setup))
        between_passes = max(gathered + states.held_by_autograd(shard.expert_parameters, setup), kept_whole)
    held = states.held_by_autograd(kinds[0].expert_parameters, setup)
    buckets, reduce_buckets = _buckets(shard, setup)
    layout = setup.layout  # each kind of parallelism has process groups in addition to that of all ranks
    groups = 1 + sum(size > 1 for size in (layout.tensor, layout.pipeline, layout.sequence, layout.expert))
    frozen = width / (setup.zero_ranks if setup.zero_stage == 3 else 1)  # bytes per parameter
    # A teacher in 4 bits is whole on each rank. A frozen vision tower is never quantised; its activations for a batch's
    # images are not counted, as they are freed before the layers begin, and its outputs are tokens of the sequence.
    teacher = (states.NF4 if setup.teacher_quantized else frozen) * setup.teacher_parameters
    others = {"teacher": teacher, "vision_tower": frozen * profile.tower_parameters}
    beside, runtime = {name: size for name, size in others.items() if size}, COUNTS.context + COUNTS.cublas

    def at(held: Components, unusable: float = 0.0, **more: float) -> Components:
        allocated = {**held, **more, **beside}
        used, own = sum(allocated.values()), runtime + (groups * COUNTS.nccl if setup.world_size > 1 else 0)
        alone = setup.zero_ranks == 1 and setup.offload_optimizer != "none"
        pieces = COUNTS.fragmentation_sharded * sum(held.values()) if setup.zero_stage == 3 and not alone else 0.0
        fragmentation = COUNTS.fragmentation * used + unusable
        least = min(fragmentation, COUNTS.fragmentation_least * (used + pieces))
        fragmentation = pieces + max(min(fragmentation, room - used - pieces - own), least)
        return {**allocated, "runtime": own, "fragmentation": fragmentation}

    forward, backwards, step = (states.held_bytes(shard, setup, moment) for moment in get_args(Moment))
    # While weights are loaded, each is allocated once and nothing is released in between.
    found: dict[str, Components] = {
        "loading": {**states.loading_bytes(shard, setup), **beside, "runtime": runtime, "fragmentation": 0.0}
    }
    if setup.rollout_answers:  # their keys and values, at full length; linear attention's small state is not counted
        tokens = width * setup.rollout_answers * setup.sequence_length
        cache = tokens * sum(count * profile.cached_per_token(kind) for kind, count in shard.layer_counts)
        whole = gathered
        if setup.zero_stage == 3 and setup.rollout_gathers:  # beyond a rank's shards
            whole = max(whole, width * shard.parameters * (1 - 1 / setup.zero_ranks))
        found["rollout"] = at(forward, key_value_cache=cache, live_parameters=whole)
    live, everything = {"live_parameters": between_passes}, reduce_buckets
    if setup.zero_ranks > 1 and not reduce_buckets:  # without buckets a copy is reduced after the backward pass
        everything += min(shard.trained(setup), COUNTS.all_reduce_buffer) * (4 if setup.fp32_accumulation else width)
    return {
        **found,
        "loss": at(forward, unusable, activations=waiting, logits=loss, buckets=buckets, **live),
        "backward": at(forward, activations=waiting + max(peaks), buckets=reduce_buckets, **live),
        "gradients": at(backwards, activations=first, live_parameters=gathered + held, buckets=everything),
        "step": at(step, buckets=buckets),
    }


def _kept_bytes(shard: StageShard, setup: TrainingSetup) -> float:
    """Return the bytes kept of a micro-batch after its forward pass, on the GPU or offloaded."""
    return sum(count * activations.kept_bytes(kind, setup) for kind, count in shard.layer_counts)


def _buckets(shard: StageShard, setup: TrainingSetup) -> tuple[float, float]:
    """Return the bytes of the gradient buckets: those that always exist, and those during reduction."""
    size = setup.reduced(shard.hidden_size)
    one = size * (4 if setup.fp32_accumulation else WIDTH[setup.precision])
    if setup.zero_stage == 3:
        kept = one + (COUNTS.muon_buffers if setup.optimizer == "muon" else 0)
        return kept, kept + one  # the buffer, and a copy in the order of the ranks
    if setup.zero_stage == 0 or (setup.zero_stage == 1 and setup.fp32_accumulation):
        return 0.0, 0.0
    # With several ranks a flat copy is reduced (deepspeed, stage_1_and_2.py, `allreduce_bucket`).
    flat = min(1.0, shard.trained(setup) / size) if setup.zero_ranks > 1 else 0.0
    return 0.0, one * ((2 if setup.overlap_comm else 1) + flat)
