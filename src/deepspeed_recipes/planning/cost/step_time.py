"""Step time: the seconds of an optimizer step, by component, on the slowest pipeline stage."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from .. import TABLES
from ..hardware.cluster import Cluster
from ..hardware.gpus import DESKTOP_GBS, DESKTOP_GPUS
from ..model_profile.profile import LayerProfile, ModelProfile
from . import activations, communication, compute_time
from .communication import Group, zero_traffic
from .compute_time import COMPUTE, Job
from .constants import COUNTS, Constants, constants_of
from .states import stage_shards
from .training_setup import TrainingSetup


def updated_bytes(setup: TrainingSetup) -> float:
    """Return the bytes that an optimizer step on the GPU moves per updated parameter of a rank."""
    width = 0.5 if setup.bf16_states else 1.0
    adam = width * COUNTS.adam * (COUNTS.foreach if setup.software.foreach_adam else 1.0)
    if setup.zero_stage == 0:
        return adam + width * COUNTS.clipping
    return adam + (COUNTS.zero_step_bf16 if setup.bf16_states else COUNTS.zero_step)


def _optimizer_seconds(job: Job, stage: Mapping[str, float]) -> tuple[float, float, float]:
    """Return the seconds of the optimizer's step, of transfers to and from the host, and of those of the drives."""
    setup, cluster, known, zero = job.setup, job.cluster, job.known, job.setup.zero_stage
    ranks, micro_batches = min(cluster.gpus_per_node, setup.world_size), setup.gradient_accumulation_steps
    own, offload, nvme = stage["updated"] / (setup.zero_ranks if zero else 1), 0.0, 0.0
    launches = (known.step_sharded if zero == 3 else known.step) * stage["trained_weights"]  # by the host
    if setup.offload_optimizer != "none":
        desktop = cluster.gpu.kind == "geforce" and cluster.gpus_per_node <= DESKTOP_GPUS
        memory_gbs = DESKTOP_GBS if desktop else cluster.gpu.host_gbs
        # Clouds count two threads per core.
        rate = min(COUNTS.cpu_adam * memory_gbs, COUNTS.core_adam * (cluster.cores / 2 or math.inf))
        adam = COUNTS.cpu_step * own * ranks / ((cluster.machine and cluster.machine.host_adam) or rate)
        # The gradients of every micro-batch go to the host, the weights come back.
        offload = communication.to_host(setup.value_bytes * own * (micro_batches + 1), cluster, known)
    elif known.cpu:
        adam = own * known.cpu.updated
    else:
        adam = own * updated_bytes(setup) / job.bandwidth
    if setup.offload_optimizer == "nvme":
        nvme += own * COUNTS.swapped
    if setup.offload_parameters == "nvme":
        nvme += 2 * setup.weight_bytes * stage["parameters"] / setup.zero_ranks * micro_batches
    nvme *= ranks / (cluster.nvme_gbs * 1e9)
    reductions = (0, 1, micro_batches, micro_batches)[zero]  # each copies and divides a rank's gradients
    if known.cpu:
        written, copied = known.cpu.gradients[0], known.cpu.gradients[(0, 1, 1, 2)[zero]]
        copies = stage["trained"] * (micro_batches * written + reductions * max(0.0, copied - written))
        return copies + adam + launches, offload, nvme
    return reductions * COUNTS.reduction * stage["trained"] / job.bandwidth + max(adam, launches), offload, nvme


COMPONENTS: dict[str, str] = TABLES["components"]
"""The components of a step's time, as parts of a sentence. Time that overlaps with other work counts once."""
SPLIT = ("tensor", "sequence", "expert")


@dataclass(frozen=True)
class StepTime:
    """One optimizer step on the slowest pipeline stage."""

    components: Mapping[str, float]
    """Seconds by the names in `COMPONENTS`."""
    tokens: float
    """Tokens per step over all ranks."""
    gpus: int
    measured: bool
    """True if the constants of this GPU were measured."""

    @cached_property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return sum(self.components.values())

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Throughput, padding included."""
        return self.tokens / self.seconds / self.gpus


def step_time(
    profile: ModelProfile, setup: TrainingSetup, cluster: Cluster, given: Constants | None = None
) -> StepTime:
    """Return the predicted time of an optimizer step, with the constants of the cluster's GPU unless some are given.

    Ranks fill the nodes one after the other, in the order of `recipe.layout.rank_position`. A pipeline's micro-batches
    are its gradient accumulation steps.
    """
    known = given or constants_of(cluster.gpu, cluster.machine, setup.precision)
    job, cpu, micro_batches = Job(profile, setup, cluster, known), known.cpu, setup.gradient_accumulation_steps
    stages = _stages(job)
    stage = max(stages, key=lambda stage: stage["micro_batch"])
    compute = sum(stage[name] for name in COMPUTE)
    collectives, once = _zero_seconds(job, stage)
    # The two passes of a micro-batch fetch a rank's offloaded weights, and activations go and come.
    offloaded = stage["moved"]
    if setup.offload_parameters != "none":
        offloaded += setup.weight_bytes * stage["parameters"] / setup.zero_ranks
    fetches = 2 * communication.to_host(offloaded, cluster, known)
    rest = cpu.rest[setup.zero_stage == 3] if cpu else (0.0, 0.0)
    transfers, overlap = collectives + fetches, known.overlap if setup.overlap_comm else 0.0
    visible = 1 - overlap * min(transfers, compute) / transfers if transfers else 1.0
    # The step ends with the last stage's update.
    optimizer, offload, nvme = _optimizer_seconds(job, max(stages, key=lambda stage: stage["updated"]))
    components = {
        **{name: micro_batches * stage[name] for name in (*COMPUTE, *SPLIT)},
        "zero": micro_batches * collectives * visible + once,
        "pipeline": micro_batches * stage["sent"],
        # d stages wait for the time of (d - 1) micro-batches: (d - 1) / (m + d - 1) of the step.
        "bubble": (setup.layout.pipeline - 1) * stage["micro_batch"],
        "optimizer": optimizer,
        "offload": offload + micro_batches * fetches * visible,
        "nvme": nvme,
        "rest": micro_batches * rest[0] + rest[1],
    }
    return StepTime(components, setup.tokens_per_step, setup.world_size, known.measured)


def _stages(job: Job) -> list[dict[str, float]]:
    """Return the costs of one micro-batch and a rank's parameters before ZeRO, for each kind of pipeline stage.

    These are the sums of `_layer` over the stage's layers, the number of `layers`, `sent`, and the `micro_batch` as a
    whole. `updated` parameters are shared by all of ZeRO's ranks.
    """
    profile, setup, layout, links, sent = job.profile, job.setup, job.setup.layout, (job.cluster, job.known), 0.0
    if layout.pipeline > 1:  # a micro-batch to the next stage, and the gradient to the previous one
        # Tensor-parallel ranks hold the same activations: each sends its part, and the receivers gather the parts.
        stride = layout.tensor * layout.sequence * setup.data_parallel_size
        part = communication.send(job.activation_bytes / layout.tensor, Group(layout.pipeline, stride), *links)
        sent = 2 * (part + communication.gather(job.activation_bytes, Group(layout.tensor, 1), *links))
    found = []
    for shard in {id(shard): shard for shard in stage_shards(profile, setup)}.values():
        of_kinds = [(_layer(job, kind), count) for kind, count in shard.layer_counts]
        stage = {name: sum(count * one[name] for one, count in of_kinds) for name in of_kinds[0][0]}
        stage["parameters"] = shard.parameters - shard.expert_parameters * (1 - 1 / layout.expert)
        stage["updated"] = shard.trained(setup)  # experts elsewhere are updated together with this rank's
        stage["trained"] = stage["updated"] if setup.lora else setup.trained_share * stage["parameters"]
        stage["logits"] = compute_time.head_seconds(job) if shard.is_last else 0.0
        stage |= {"sent": sent, "layers": sum(count for _, count in shard.layer_counts)}
        stage["micro_batch"] = sum(stage[name] for name in (*COMPUTE, *SPLIT, "sent"))
        found.append(stage)
    return found


def _layer(job: Job, kind: LayerProfile) -> dict[str, float]:
    """Return a layer's seconds for a micro-batch, and numbers for other components of the step."""
    profile, setup, layout, size = job.profile, job.setup, job.setup.layout, job.activation_bytes
    links = job.cluster, job.known
    moved = activations.kept_bytes(kind, setup) if setup.activation_offloading else 0.0
    # ZeRO-3 gathers as many matrices at once as it prefetches. Experts that are modules are gathered one
    # by one: which are next is not known, and each change ends prefetching (deepspeed issue 4808).
    matrices, gathers = len(kind.linears), 1.0
    if matrices:
        ahead = math.ceil(setup.prefetched(profile.hidden_size, kind.parameters) / (kind.parameters / matrices))
        experts = COUNTS.expert_matrices * compute_time.experts_alone(kind, setup)
        gathers = matrices + experts if experts else max(1.0, matrices / ahead)
    forward = 1 + (setup.recomputes_layers or setup.selective)
    # Forward, the outputs of attention and of the feed-forward layer are summed; backward, AutoTP sums the gradient of
    # each matrix's input separately.
    sums = 2 * forward + max(2, matrices - 2)
    # Queries, keys and values go to the ranks that have their heads, and the results come back. Before and after each
    # exchange, its parts are joined: read and written (`training.parallel.sequence._exchange`).
    heads = 2 * profile.attention_heads + 2 * profile.key_value_heads
    head_width = kind.attention_width / profile.attention_heads
    exchanged = size / profile.hidden_size * head_width * heads / layout.tensor if layout.sequence > 1 else 0.0
    exchange = communication.all_to_all(exchanged, Group(layout.sequence, layout.tensor), *links, 4)
    routed = 2 * kind.experts_per_token * size
    return {
        **compute_time.layer_seconds(job, kind),
        "tensor": sums * 2 * communication.gather(size, Group(layout.tensor, 1), *links),
        "sequence": (forward + 1) * (exchange + 4 * exchanged / job.bandwidth),
        "expert": (forward + 1) * communication.all_to_all(routed, Group(layout.expert, 1), *links),
        "trained_weights": compute_time.trained_weights(kind, setup),  # their number
        "moved": moved,  # bytes of activations that are offloaded between the passes
        "gathers": gathers,  # number of collectives
    }


def _zero_seconds(job: Job, stage: Mapping[str, float]) -> tuple[float, float]:
    """Return the seconds of ZeRO's collectives per micro-batch, which computation can hide, and once per step."""
    setup, links = job.setup, (job.cluster, job.known)
    group = Group(setup.zero_ranks, setup.layout.tensor)
    # Gradients are reduced by buckets in ZeRO, by layers in DDP.
    reductions = stage["layers"]
    if setup.zero_stage:
        buckets = 1 + stage["trained"] / setup.reduced(job.profile.hidden_size)
        reductions = min(stage["trained_weights"], buckets)
    gradients = setup.value_bytes * stage["trained"]
    gathered = communication.gather(gradients, group, *links, reductions)
    if setup.zero_stage == 3:
        near = group if setup.partition_size == 1 else Group(setup.partition_size, setup.layout.tensor)
        held, weights = stage["parameters"], setup.weight_bytes * stage["parameters"]
        ahead, back = (communication.gather(weights, one, *links, stage["gathers"]) for one in (group, near))
        sent = zero_traffic(3, int(held), 0, 1, 1, setup.kept_weights)["all-gather"]
        again = sent / held - 1 if held else 0.0  # the share that ZeRO-3 has not kept
        return ahead + again * back + gathered, 0.0
    # An all-reduce of gradients takes twice that: at stage 2 in every backward pass, otherwise after the last pass.
    # Then, with ZeRO, the updated weights are gathered.
    if setup.zero_stage == 2:
        return 2 * gathered, gathered
    return 0.0, (3 if setup.zero_stage else 2) * gathered
