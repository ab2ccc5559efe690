"""How long a step takes, and on what the time goes."""

from dataclasses import dataclass, fields, replace

from recipes.planning import links, work
from recipes.planning.anatomy import Anatomy, Kind
from recipes.planning.constants import Constants, constants
from recipes.planning.hardware import Cluster
from recipes.planning.links import Group
from recipes.planning.parts import stages
from recipes.planning.setup import Setup

ADAM = 40
"""Bytes of GPU memory moved per parameter that Adam changes: 4 + 12 read, 12 + 2 written, and the gradient's norm and
conversion to fp32, 2 + 4 + 4."""
CPU_ADAM = 4e9
"""Parameters per second and node that DeepSpeed's CPU Adam changes: ZeRO-Offload, arXiv:2101.06840, table 4 (1 to 10
billion parameters in 0.22 to 2.57 s on a node with two Xeon 8168)."""
SWAPPED = 32
"""Bytes per parameter that go to and from the drives in a step: fp32 weights, both moments and gradients, each way."""


@dataclass(frozen=True)
class Time:
    """Seconds of one optimizer step on the slowest pipeline stage, as far as nothing else hides them."""

    matmul: float
    """Products with the layers' weights, forward and backward."""
    attention: float
    elementwise: float
    """Bound by the GPU's memory: norms, activations, residual sums, adapters, 4-bit weights."""
    recomputation: float
    """The forward pass once more, of checkpointed layers."""
    logits: float
    """The output matrix and the loss."""
    launch: float
    """The GPU waits for its next kernel."""
    tensor: float
    """All-reduces of tensor parallelism."""
    sequence: float
    """All-to-alls of sequence parallelism."""
    expert: float
    """All-to-alls of expert parallelism."""
    zero: float
    """ZeRO's or data parallelism's collectives that are not hidden behind computation."""
    pipeline: float
    """What stages send each other."""
    bubble: float
    """In which stages wait for the first micro-batch to arrive and the last to come back."""
    optimizer: float
    """Adam, wherever it runs."""
    offload: float
    """Over PCIe, to the host and back."""
    nvme: float
    """To the drives and back."""
    tokens: float
    """Of the step, over the whole world."""
    gpus: int
    model_flops: float
    """Of the step, over the whole world, without recomputation."""
    peak_flops: float
    """Of one GPU, per second."""
    measured: bool
    """Whether the constants of this GPU were measured."""

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by component."""
        return {field.name: getattr(self, field.name) for field in fields(self)[:15]}

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return sum(self.parts.values())

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Throughput, padding included."""
        return self.tokens / self.seconds / self.gpus

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: what is progress, as a share of what the GPUs could do."""
        return self.model_flops / self.seconds / self.gpus / self.peak_flops


def step(anatomy: Anatomy, setup: Setup, cluster: Cluster, given: Constants | None = None) -> Time:
    """Return how long an optimizer step takes.

    Args:
        anatomy: of the model.
        setup: how it is trained; the pipeline's micro-batches are its `accumulation`.
        cluster: where; ranks fill its nodes one after the other, in the order of `spec.layout.place`.
        given: constants; None: those of the cluster's GPU with DeepSpeed.
    """
    known = given or constants(cluster.gpu.name)
    if setup.precision == "fp32":
        # As TF32, at half the rate of bf16; without it (torch's default) it is slower still.
        known = replace(known, matmul=known.matmul / 2, attention=known.attention / 2)
    stage = max(_stages(anatomy, setup, cluster, known), key=lambda stage: stage.micro_batch)
    micro = setup.accumulation
    others = setup.layout.pipeline - 1
    hidden_by = stage.compute.total
    zero, once = _zero(stage, setup, cluster, known)
    shown = _exposed(zero, hidden_by, known.overlap if setup.overlap_comm else 0.0)
    optimizer, offload, nvme = _update(stage.parameters, stage.changed, setup, cluster, known)
    rest = (stage.tensor, stage.sequence, stage.expert, stage.sent)
    compute = stage.compute
    return Time(
        matmul=micro * compute.matmul,
        attention=micro * compute.attention,
        elementwise=micro * compute.elementwise,
        recomputation=micro * compute.recomputation,
        logits=micro * compute.logits,
        launch=micro * compute.launch,
        tensor=micro * stage.tensor,
        sequence=micro * stage.sequence,
        expert=micro * stage.expert,
        zero=micro * shown + once,
        pipeline=micro * stage.sent,
        # (d - 1) more micro-batches' time than one stage alone would take: (d - 1) / (m + d - 1) of the whole.
        bubble=others * (hidden_by + sum(rest)),
        optimizer=optimizer,
        offload=offload,
        nvme=nvme,
        tokens=setup.tokens_per_step,
        gpus=setup.world_size,
        model_flops=work.model_flops(anatomy, setup),
        peak_flops=cluster.gpu.bf16_tflops * 1e12,
        measured=known.measured,
    )


@dataclass(frozen=True)
class _Stage:
    """One micro-batch on a rank of one pipeline stage, in seconds, and what the rank holds."""

    layers: int
    compute: work.Seconds
    tensor: float
    sequence: float
    expert: float
    sent: float
    parameters: float
    """That the rank has, before ZeRO shards them."""
    trained: float
    """Of them."""
    changed: float
    """Trained ones that ZeRO's ranks share out between them: spread experts count for all of these."""

    @property
    def micro_batch(self) -> float:
        return self.compute.total + self.tensor + self.sequence + self.expert + self.sent


def _stages(anatomy: Anatomy, setup: Setup, cluster: Cluster, known: Constants) -> list[_Stage]:
    """Return every pipeline stage; without a pipeline, the one there is."""
    layout = setup.layout
    ranges = stages(anatomy, layout.pipeline)
    kinds = anatomy.kinds
    seconds = [work.layer(kind, anatomy, setup, cluster.gpu, known) for kind in kinds]
    split = [kind.parameters - kind.split + kind.split / layout.tensor for kind in kinds]
    elsewhere = [kind.routed * (1 - 1 / layout.expert) for kind in kinds]
    adapters = [work.adapter_parameters(kind, setup) / layout.tensor for kind in kinds]
    tensor, sequence, expert = zip(*(_passed(kind, anatomy, setup, cluster, known) for kind in kinds), strict=True)
    sent = _sent(anatomy, setup, cluster, known)
    found = []
    for number, layers in enumerate(ranges):
        counts = [anatomy.order[layers.start : layers.stop].count(index) for index in range(len(kinds))]

        def total(each: list | tuple, counts: list[int] = counts) -> float:
            return sum(count * value for count, value in zip(counts, each, strict=True))

        last = number == len(ranges) - 1
        compute = work.head(anatomy, setup, cluster.gpu, known) if last else work.Seconds()
        for count, value in zip(counts, seconds, strict=True):
            compute += value * count
        ends = (anatomy.embedding if number == 0 else 0) + (anatomy.head if last else 0)
        changed = total(adapters) if setup.lora else total(split) + ends / layout.tensor
        parameters = total(split) + ends / layout.tensor - total(elsewhere)
        found.append(
            _Stage(
                len(layers),
                compute,
                total(tensor),
                total(sequence),
                total(expert),
                sent,
                parameters,
                changed if setup.lora else parameters,
                changed,
            )
        )
    return found


def _activations(anatomy: Anatomy, setup: Setup) -> float:
    """Return the bytes that a micro-batch has between two layers, on one rank."""
    tokens = setup.micro_batch_size * setup.sequence_length / setup.layout.sequence
    return 2 * tokens * anatomy.hidden


def _sent(anatomy: Anatomy, setup: Setup, cluster: Cluster, known: Constants) -> float:
    """Return the seconds in which a stage passes a micro-batch on, and its gradient back.

    Tensor ranks have the same numbers: each sends its part to the next node, where they are put together again.
    """
    layout, activations = setup.layout, _activations(anatomy, setup)
    if layout.pipeline == 1:
        return 0.0
    stride = layout.tensor * layout.sequence * setup.rows
    part = links.send(activations / layout.tensor, Group(layout.pipeline, stride), cluster, known)
    return 2 * (part + links.gather(activations, Group(layout.tensor, 1), cluster, known))


def _passed(
    kind: Kind, anatomy: Anatomy, setup: Setup, cluster: Cluster, known: Constants
) -> tuple[float, float, float]:
    """Return the seconds of what a layer's ranks pass to each other: tensor, sequence and expert parallelism."""
    layout = setup.layout
    activations = _activations(anatomy, setup)
    forward = 1 + setup.gradient_checkpointing
    # Forward, the ways back to the model's width add up (attention's and the feed-forward layer's); backward, AutoTP
    # sums the gradient of each way in by itself.
    sums = 2 * forward + max(2, len(kind.linears) - 2)
    tensor = sums * links.all_reduce(activations, Group(layout.tensor, 1), cluster, known)
    # Queries, keys and values go to the ranks that have their heads, and what comes of them comes back.
    heads = 2 * anatomy.heads + 2 * anatomy.key_value_heads
    shared = activations / anatomy.hidden * (kind.attention_width / anatomy.heads) * heads / layout.tensor
    sequence = (forward + 1) * links.all_to_all(shared, Group(layout.sequence, layout.tensor), cluster, known)
    routed = 2 * kind.chosen * activations
    expert = (forward + 1) * links.all_to_all(routed, Group(layout.expert, 1), cluster, known)
    return tensor, sequence, expert


def _zero(stage: _Stage, setup: Setup, cluster: Cluster, known: Constants) -> tuple[float, float]:
    """Return the seconds of ZeRO's collectives per micro-batch, which computation can hide, and once per step."""
    layout = setup.layout
    group = Group(setup.zero_ranks, layout.tensor)
    reduced = links.gather(2 * stage.trained, group, cluster, known, stage.layers)
    if setup.stage == 3:
        near = group if setup.partition_size == 1 else Group(setup.partition_size, layout.tensor)
        weights = (0.5 if setup.quantized else 2) * stage.parameters
        gathered = [links.gather(weights, ranks, cluster, known, stage.layers) for ranks in (group, near)]
        return sum(gathered) + reduced, 0.0
    if setup.stage == 2:
        return reduced, reduced
    # Once per step, when the last micro-batch is back.
    return 0.0, 2 * reduced


def _exposed(passing: float, computing: float, overlap: float) -> float:
    """Return the part of `passing` that `computing` does not hide."""
    return passing - overlap * min(passing, computing)


def _update(
    parameters: float, changed: float, setup: Setup, cluster: Cluster, known: Constants
) -> tuple[float, float, float]:
    """Return the seconds of Adam, of the way to the host and back, and of the way to the drives and back."""
    own = changed / (setup.zero_ranks if setup.stage else 1)
    ranks = min(cluster.gpus_per_node, setup.world_size)
    offload = nvme = 0.0
    if setup.offload_optimizer == "none":
        adam = own * ADAM / (cluster.gpu.memory_gbs * 1e9 * known.memory)
    else:
        adam = own * ranks / CPU_ADAM
        # Gradients of every micro-batch go there, weights come back.
        offload += links.to_host(2 * own * (setup.accumulation + 1), cluster, known)
    if setup.offload_optimizer == "nvme":
        nvme += own * ranks * SWAPPED / (cluster.nvme_gbs * 1e9)
    if setup.offload_parameters != "none":
        fetched = 2 * parameters / setup.zero_ranks * 2 * setup.accumulation
        offload += links.to_host(fetched, cluster, known)
        if setup.offload_parameters == "nvme":
            nvme += fetched * ranks / (cluster.nvme_gbs * 1e9)
    return adam, offload, nvme
