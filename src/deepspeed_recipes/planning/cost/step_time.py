"""Step time: the seconds of an optimizer step, by component, on the slowest pipeline stage."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from ...recipe.files import JsonView
from ...recipe.recipe import Precision
from ..hardware.cluster import Cluster
from ..hardware.gpus import Gpu
from ..hardware.machine_file import CPU, HEAD_WIDTH, NARROW_HEAD, Machine, attention_operations
from ..model_profile.profile import LayerProfile, ModelProfile
from . import activations, communication, compute_time
from .communication import Group, zero_traffic
from .compute_time import HALF_SPEED, KERNELS, RESIDUAL, TILE
from .constants import Constants, Cpu, constants
from .training_setup import TrainingSetup
from .weights import stage_ranges

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
    if known.cpu:
        written, copied = known.cpu.gradients[0], known.cpu.gradients[(0, 1, 1, 2)[setup.zero_stage]]
        return trained * (micro_batches * written + reductions * max(0.0, copied - written))
    return reductions * REDUCTION * trained / (cluster.gpu.memory_gbs * 1e9 * known.memory)


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
        if known.cpu:
            adam = own * known.cpu.updated[(0, 1, 1, 2)[setup.zero_stage]]
    else:
        adam = CPU_STEP * own * ranks_per_node / _host_adam(cluster)
        # The gradients of every micro-batch go to the host, the weights come back.
        sent = setup.value_bytes * own * (setup.gradient_accumulation_steps + 1)
        offload += communication.to_host(sent, cluster, known)
    if setup.offload_optimizer == "nvme":
        nvme += own * ranks_per_node * SWAPPED / (cluster.nvme_gbs * 1e9)
    if setup.offload_parameters == "nvme":
        fetched = 2 * setup.weight_bytes * parameters / setup.zero_ranks * setup.gradient_accumulation_steps
        nvme += fetched * ranks_per_node / (cluster.nvme_gbs * 1e9)
    return adam, offload, nvme


TRAINED = 0.84
"""Share of the rate of a large product by itself that products reach in a run, where the clock falls with the power:
0.63 of an H100's peak fitted to published runs, against 745 of 989 TFLOP/s alone (an H100 of ours, 2026-11-26)."""
LAYER_MODULES = 9
"""Modules with weights in a Llama layer, which ZeRO-3 fetches and releases one by one."""


def measured_constants(machine: Machine, assumed: Constants, gpu: Gpu, precision: str) -> Constants:
    """Return the cost model's constants, with those measured on a machine in place of the assumed ones.

    Args:
        machine: the measurements.
        assumed: the constants of this kind of GPU.
        gpu: the GPU whose peak the shares are of.
        precision: the run's; fp32 has rates of its own.
    """
    dtype = "fp32" if precision == "fp32" else "bf16"
    if machine.device == CPU:
        return _on_cpus(machine, assumed, gpu, dtype)
    peak = gpu.bf16_tflops * 1e12
    plain, sharded = (machine.seconds[f"layer {name}"] for name in ("zero1", "zero3"))
    found = {
        "matmul": TRAINED * _product_rate(machine, dtype, assumed.waves * TILE * gpu.units) / peak,
        "memory": 1.0,
        "link": 1.0,
        "peer": 1.0 if assumed.peer else 0.0,
        "launch": plain["forward"] / KERNELS,
        "hook": max(0.0, sharded["forward"] - plain["forward"]) / LAYER_MODULES,
        "step": plain["step"],
        "step_sharded": sharded["step"],
        "kernels": {**assumed.kernels, **_kernels(machine, dtype, peak)},
        "measured": True,
    }
    if machine.network_gbs:
        found["network"] = 1.0
    if "all_gather small" in machine.seconds:
        found["latency"] = machine.seconds["all_gather small"]
        found["waiting"] = 0.0  # the hooks were measured on all ranks of the node
    return replace(assumed, **found)


def _on_cpus(machine: Machine, assumed: Constants, gpu: Gpu, dtype: str) -> Constants:
    """Return the constants of CPU ranks, which are all measured."""
    seconds, peak = machine.seconds, gpu.bf16_tflops * 1e12
    products = tuple((float(side), rate) for side, rate in machine.product_rates(dtype))
    plain, zero1, zero3 = (seconds[f"layer {name}"] for name in ("plain", "zero1", "zero3"))
    hooks = {name: max(0.0, zero3[name] - zero1[name]) for name in ("forward", "backward")}
    suffix = " fp32" if dtype == "fp32" else ""
    gather = seconds[f"all_gather large{suffix}"] if machine.ranks > 1 else 0.0
    alone = seconds["layer plain fp32"] if dtype == "fp32" else plain
    launch = alone["forward"] / KERNELS
    cpu = Cpu(
        products=products,
        score=_per_score(machine, dtype),
        backward_launches=alone["backward"] / alone["forward"],
        backward_hooks=hooks["backward"] / hooks["forward"] if hooks["forward"] else 0.0,
        gradient_hook=max(0.0, zero1["backward"] - plain["backward"]) / LAYER_MODULES,
        updated=_per_parameter(machine, dtype, "step"),
        gradients=_per_parameter(machine, dtype, "backward"),
        rest=(_rest(zero1), _rest(zero3)),
    )
    latency = 0.0
    if machine.ranks > 1:
        latency = min(gather, seconds[f"all_gather small{suffix}"])
        cpu = replace(
            cpu,
            all_reduce=seconds[f"all_reduce large{suffix}"] / (2 * gather),
            reduce_scatter=seconds[f"reduce_scatter large{suffix}"] / gather,
        )
        # ZeRO-3's addition to a layer contains the collective that gathers it.
        hooks["forward"] = max(0.0, hooks["forward"] - latency)
        share = (machine.ranks - 1) / machine.ranks
        rate = share * machine.sizes["message"] / max(1e-9, gather - latency)
    return replace(
        assumed,
        matmul=products[-1][1] / peak,
        waves=0.0,
        memory=_elementwise(machine, dtype, launch * KERNELS, assumed.passes, cpu) / (gpu.memory_gbs * 1e9),
        link=rate / (gpu.pcie_gbs * 1e9) if machine.ranks > 1 else 1.0,
        peer=0.0,
        latency=latency,
        gap=0.0,
        overlap=0.0,
        unaligned=1.0,
        launch=launch,
        dequantize=1.0,
        hook=hooks["forward"] / LAYER_MODULES,
        waiting=0.0,
        step=zero1["step"],
        step_sharded=zero3["step"],
        kernels={},
        cpu=cpu,
        measured=True,
    )


def _per_parameter(machine: Machine, dtype: str, which: str) -> tuple[float, float, float]:
    """Return the seconds per parameter of a single rank without ZeRO, at ZeRO-1, and at ZeRO-3."""
    taken = machine.alone["parameter"]
    return taken[f"{dtype} plain {which}"], taken[f"{dtype} zero1 {which}"], taken[f"{dtype} zero3 {which}"]


def _rest(layer: JsonView) -> tuple[float, float]:
    """Return the host's seconds outside the layers, per micro-batch and per step."""
    return layer["rest forward"] + layer["rest backward"], layer["rest step"]


def _per_score(machine: Machine, dtype: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the seconds of attention per score, and per score and unit of the heads' width, by pass."""
    scores, taken = machine.sizes["heads"] * machine.sizes["length"] ** 2, machine.seconds["attention"]
    found = []
    for which, less in (("forward", 0.0), ("both", 1.0)):
        narrow, wide = (
            (taken[f"{name} {dtype} {which}"] - less * taken[f"{name} {dtype} forward"]) / scores
            for name in ("narrow", "flash_2")
        )
        per_width = max(0.0, wide - narrow) / (HEAD_WIDTH - NARROW_HEAD)
        found.append((max(0.0, narrow - NARROW_HEAD * per_width), per_width))
    return found[0], found[1]


def _elementwise(machine: Machine, dtype: str, launches: float, passes: float, cpu: Cpu) -> float:
    """Return the bytes per second of a layer's element-wise operations, by the engine's count of bytes in bf16.

    They are what the passes of a layer take beyond its products, its attention and Python.
    """
    hidden, inner, heads, kept, sequences, length = machine.sizes["wide"].values()
    tokens, weights = sequences * length, hidden * (hidden * (2 + 2 * kept / heads) + 3 * inner)
    rest = sum(machine.seconds["wide"][f"{dtype} {name}"] for name in ("forward", "backward"))
    rest -= 6 * tokens * weights / cpu.products[-1][1] + (1 + cpu.backward_launches) * launches
    rest -= tokens * length * heads * sum(each + wide * hidden / heads for each, wide in cpu.score)
    moved = 3 * 2 * tokens * (passes * weights / hidden + RESIDUAL * hidden)
    return float(moved / max(rest, moved * machine.seconds["copy"] / (2 * machine.sizes["copy"])))


def _kernels(machine: Machine, dtype: str, peak: float) -> dict[str, tuple[float, float]]:
    """Return the share of the peak that each attention kernel would reach on long sequences, by pass."""
    length, taken = machine.sizes["length"], machine.seconds["attention"]
    operations = attention_operations(machine.sizes) * (1 + HALF_SPEED / length)
    found = {}
    for name in {key.split()[0] for key in taken if f" {dtype} " in key}:
        ahead, both = (taken[f"{name} {dtype} {which}"] for which in ("forward", "both"))
        if both > ahead:
            found[name] = (operations / ahead / peak, 2.5 * operations / (both - ahead) / peak)
    return found


def _product_rate(machine: Machine, dtype: str, lost: float) -> float:
    """Return the operations per second of a product without the `lost` elements, by the largest product measured."""
    seconds = {int(name.split()[0]): taken for name, taken in machine.seconds["products"].items() if dtype in name}
    side = max(seconds)
    return float(2 * side**3 / seconds[side] * (1 + lost / side**2))


COMPONENTS = {
    "matmul": "products",
    "attention": "attention",
    "elementwise": "norms and other element-wise operations",
    "recomputation": "recomputation",
    "logits": "the output matrix and the loss",
    "launch": "launching kernels",
    "rest": "Python outside the layers",
    "tensor": "all-reduces of tensor parallelism",
    "sequence": "all-to-alls of sequence parallelism",
    "expert": "all-to-alls of expert parallelism",
    "zero": "collectives of ZeRO",
    "pipeline": "sending activations between stages",
    "bubble": "stages that wait for each other",
    "optimizer": "the optimizer",
    "offload": "transfers to the host",
    "nvme": "transfers to the drives",
}
"""The components of a step's time, as parts of a sentence. Time that overlaps with other work counts once."""


@dataclass(frozen=True)
class StepTime:
    """One optimizer step on the slowest pipeline stage."""

    components: Mapping[str, float]
    """Seconds by the names in `COMPONENTS`."""
    tokens: float
    """Tokens per step over all ranks."""
    gpus: int
    model_flops: float
    """Operations per step over all ranks, without recomputation."""
    peak_flops: float
    """Operations per second of one GPU."""
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

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: the share of the GPUs' peak that is progress."""
        return self.model_flops / self.seconds / self.gpus / self.peak_flops


def step_time(
    profile: ModelProfile, setup: TrainingSetup, cluster: Cluster, given: Constants | None = None
) -> StepTime:
    """Return the predicted time of an optimizer step.

    Args:
        profile: the model's profile.
        setup: the training setup; a pipeline's micro-batches are its gradient accumulation steps.
        cluster: the machines; ranks fill the nodes one after the other, in the order of `recipe.layout.rank_position`.
        given: the constants to use, or None for those of the cluster's GPU with DeepSpeed.
    """
    known = given or _constants(cluster.gpu, cluster.machine, setup.precision)
    stages = _stage_times(profile, setup, cluster, known)
    stage = max(stages, key=lambda stage: stage.micro_batch)
    largest = max(stages, key=lambda stage: stage.updated)  # the step ends with the last stage's update
    micro_batches, compute = setup.gradient_accumulation_steps, stage.compute
    collectives, once = _zero_seconds(stage, profile, setup, cluster, known)
    # The two passes of a micro-batch fetch a rank's offloaded weights, and activations go and come.
    offloaded = 0.0 if setup.offload_parameters == "none" else setup.weight_bytes * stage.parameters / setup.zero_ranks
    fetches = 2 * communication.to_host(offloaded + stage.moved, cluster, known)
    cpu = known.cpu
    rest = cpu.rest[setup.zero_stage == 3] if cpu else (0.0, 0.0)
    transfers, overlap = collectives + fetches, known.overlap if setup.overlap_comm else 0.0
    visible = 1 - overlap * min(transfers, compute.total) / transfers if transfers else 1.0
    optimizer, offload, nvme = optimizer_seconds(largest.parameters, largest.updated, setup, cluster, known)
    launches = (known.step_sharded if setup.zero_stage == 3 else known.step) * stage.trained_weights  # by the host
    components = {
        **{name: micro_batches * getattr(compute, name) for name in compute_time.ComputeSeconds.__dataclass_fields__},
        "tensor": micro_batches * stage.tensor,
        "sequence": micro_batches * stage.sequence,
        "expert": micro_batches * stage.expert,
        "zero": micro_batches * collectives * visible + once,
        "pipeline": micro_batches * stage.sent,
        # d stages wait for the time of (d - 1) micro-batches: (d - 1) / (m + d - 1) of the step.
        "bubble": (setup.layout.pipeline - 1) * stage.micro_batch,
        "optimizer": copy_seconds(stage.trained, setup, cluster, known)
        + (optimizer + launches if cpu else max(optimizer, launches)),
        "offload": offload + micro_batches * fetches * visible,
        "nvme": nvme,
        "rest": micro_batches * rest[0] + rest[1],
    }
    return StepTime(
        components,
        tokens=setup.tokens_per_step,
        gpus=setup.world_size,
        model_flops=compute_time.model_flops(profile, setup),
        peak_flops=cluster.gpu.bf16_tflops * 1e12,
        measured=known.measured,
    )


@lru_cache
def _constants(gpu: Gpu, machine: Machine | None, precision: Precision) -> Constants:
    known = constants(gpu.name)
    if machine:
        return measured_constants(machine, known, gpu, precision)
    if precision != "fp32":
        return known
    # As TF32, at half the rate of bf16; without TF32 (torch's default) it is slower still.
    kernels = {name: (forward / 2, backward / 2) for name, (forward, backward) in known.kernels.items()}
    return replace(known, matmul=known.matmul / 2, attention=known.attention / 2, kernels=kernels)


@dataclass(frozen=True)
class _StageTime:
    """One micro-batch on a rank of one pipeline stage, in seconds, and the parameters of that rank."""

    layers: int
    compute: compute_time.ComputeSeconds
    tensor: float
    sequence: float
    expert: float
    sent: float
    parameters: float
    """Parameters on the rank, before ZeRO shards them."""
    trained: float
    """The trained part of these parameters."""
    moved: float
    """Bytes of activations that are offloaded between the passes."""
    updated: float
    """Trained parameters that all ranks of ZeRO's group update together, including all experts with expert
    parallelism."""
    trained_weights: float
    """Number of trained matrices and vectors, or of adapter matrices, in the layers."""
    gathers: float
    """Number of collectives in which ZeRO-3 gathers the layers for a pass."""

    @property
    def micro_batch(self) -> float:
        return self.compute.total + self.tensor + self.sequence + self.expert + self.sent


def _stage_times(profile: ModelProfile, setup: TrainingSetup, cluster: Cluster, known: Constants) -> list[_StageTime]:
    """Return one entry for each kind of pipeline stage, or a single entry without a pipeline."""
    layout, kinds = setup.layout, profile.layer_kinds
    ranges = stage_ranges(profile, layout.pipeline)
    seconds = [compute_time.layer_seconds(kind, profile, setup, cluster.gpu, known) for kind in kinds]
    split = [kind.parameters - kind.tensor_split + kind.tensor_split / layout.tensor for kind in kinds]
    elsewhere = [kind.expert_parameters * (1 - 1 / layout.expert) for kind in kinds]
    adapters = [compute_time.linear_adapter_parameters(kind, setup) / layout.tensor for kind in kinds]
    weights = [compute_time.trained_weights(kind, setup) for kind in kinds]
    gathers = [_gathers(kind, profile, setup) for kind in kinds]
    moved = [activations.kept_bytes(kind, setup) if setup.activation_offloading else 0.0 for kind in kinds]
    tensor, sequence, expert = zip(
        *(_model_parallel_seconds(kind, profile, setup, cluster, known) for kind in kinds), strict=True
    )
    sent = _send_seconds(profile, setup, cluster, known)
    found: dict[tuple[int, ...], _StageTime] = {}
    for number, layers in enumerate(ranges):
        counts = [profile.layer_order[layers.start : layers.stop].count(index) for index in range(len(kinds))]
        is_last = number == len(ranges) - 1
        if (key := (*counts, number == 0, is_last)) in found:
            continue  # most stages equal the previous stage

        def total(each: Sequence[float], counts: list[int] = counts) -> float:
            return sum(count * value for count, value in zip(counts, each, strict=True))

        compute = (
            compute_time.head_seconds(profile, setup, cluster.gpu, known) if is_last else compute_time.ComputeSeconds()
        )
        for count, value in zip(counts, seconds, strict=True):
            compute += value * count
        ends = (profile.embedding_parameters if number == 0 else 0) + (profile.head_parameters if is_last else 0)
        updated = total(adapters) if setup.lora else setup.trained_share * (total(split) + ends / layout.tensor)
        parameters = total(split) + ends / layout.tensor - total(elsewhere)
        found[key] = _StageTime(
            len(layers),
            compute,
            total(tensor),
            total(sequence),
            total(expert),
            sent,
            parameters,
            updated if setup.lora else setup.trained_share * parameters,
            total(moved),
            updated,
            total(weights),
            total(gathers),
        )
    return list(found.values())


def _activation_bytes(profile: ModelProfile, setup: TrainingSetup) -> float:
    """Return the bytes of a micro-batch's activations between two layers on one rank."""
    return setup.value_bytes * compute_time.tokens_per_pass(setup) * profile.hidden_size


def _send_seconds(profile: ModelProfile, setup: TrainingSetup, cluster: Cluster, known: Constants) -> float:
    """Return the seconds in which a stage sends a micro-batch to the next stage, and the gradient to the previous one.

    Tensor-parallel ranks hold the same activations: each sends its part, and the receivers gather the parts.
    """
    layout, size = setup.layout, _activation_bytes(profile, setup)
    if layout.pipeline == 1:
        return 0.0
    stride = layout.tensor * layout.sequence * setup.data_parallel_size
    part = communication.send(size / layout.tensor, Group(layout.pipeline, stride), cluster, known)
    return 2 * (part + communication.gather(size, Group(layout.tensor, 1), cluster, known))


def _model_parallel_seconds(
    kind: LayerProfile, profile: ModelProfile, setup: TrainingSetup, cluster: Cluster, known: Constants
) -> tuple[float, float, float]:
    """Return the seconds of a layer's collectives for tensor, sequence and expert parallelism."""
    layout = setup.layout
    size = _activation_bytes(profile, setup)
    forward = 1 + (setup.recomputes_layers or setup.selective)
    # Forward, the outputs of attention and of the feed-forward layer are summed; backward, AutoTP sums the gradient of
    # each matrix's input separately.
    sums = 2 * forward + max(2, len(kind.linears) - 2)
    tensor = sums * communication.all_reduce(size, Group(layout.tensor, 1), cluster, known)
    # Queries, keys and values go to the ranks that have their heads, and the results come back.
    heads = 2 * profile.attention_heads + 2 * profile.key_value_heads
    head_width = kind.attention_width / profile.attention_heads
    exchanged = size / profile.hidden_size * head_width * heads / layout.tensor
    sequence = (forward + 1) * communication.all_to_all(
        exchanged, Group(layout.sequence, layout.tensor), cluster, known, 4
    )
    routed = 2 * kind.experts_per_token * size
    expert = (forward + 1) * communication.all_to_all(routed, Group(layout.expert, 1), cluster, known)
    return tensor, sequence, expert


def _gathers(kind: LayerProfile, profile: ModelProfile, setup: TrainingSetup) -> float:
    """Return the number of collectives in which ZeRO-3 gathers a layer's weights.

    A collective contains as many matrices as ZeRO-3 prefetches. FSDP gathers a whole layer. Experts that are modules
    are gathered one by one: which are next is not known, and each change ends prefetching (deepspeed issue 4808).
    """
    matrices = len(kind.linears)
    if not matrices or setup.software.fsdp:
        return 1.0
    if experts := 0.0 if setup.software.grouped_experts else compute_time.experts_on_rank(kind, setup):
        return matrices + compute_time.EXPERT_MATRICES * experts
    ahead = setup.prefetched(profile.hidden_size, kind.parameters)
    return max(1.0, matrices / math.ceil(ahead / (kind.parameters / matrices)))


def _zero_seconds(
    stage: _StageTime, profile: ModelProfile, setup: TrainingSetup, cluster: Cluster, known: Constants
) -> tuple[float, float]:
    """Return the seconds of ZeRO's collectives per micro-batch, which computation can hide, and once per step."""
    layout = setup.layout
    group = Group(setup.zero_ranks, layout.tensor)
    # Gradients are reduced by buckets in ZeRO, by layers in FSDP and DDP.
    reductions: float = stage.layers
    if setup.zero_stage and not setup.software.fsdp:
        reductions = min(stage.trained_weights, 1 + stage.trained / setup.reduced(profile.hidden_size))
    gradients = setup.value_bytes * stage.trained
    gathered = communication.gather(gradients, group, cluster, known, reductions)
    if setup.zero_stage == 3:
        near = group if setup.partition_size == 1 else Group(setup.partition_size, layout.tensor)
        weights = setup.weight_bytes * stage.parameters
        forward, backward = (communication.gather(weights, one, cluster, known, stage.gathers) for one in (group, near))
        sent = zero_traffic(3, int(stage.parameters), 0, 1, 1, setup.kept_weights)["all-gather"]
        again = sent / stage.parameters - 1 if stage.parameters else 0.0  # the share that ZeRO-3 has not kept
        reduced = gathered * (known.cpu.reduce_scatter if known.cpu else 1.0)
        return forward + again * backward + reduced, 0.0
    # An all-reduce of gradients takes twice that: at stage 2 in every backward pass, otherwise after the last pass.
    # Then, with ZeRO, the updated weights are gathered.
    reduced = communication.all_reduce(gradients, group, cluster, known, reductions)
    if setup.zero_stage == 2:
        return reduced, gathered
    return 0.0, reduced + (gathered if setup.zero_stage else 0.0)
