"""Compute time: seconds of a layer, and of the head, on one rank.

They follow from its arithmetic and the bytes that it moves (a roofline), from the attention kernel of the GPU, and from
the time in which Python launches kernels, which matters if the GPU is faster.

A kernel's share of the peak grows with the sequence length, since blocks on the diagonal are computed as a whole and
short sequences leave multiprocessors idle. The shares in `constants.json` are for long sequences with causal masks.
"""

from collections.abc import Container
from dataclasses import dataclass
from math import prod

from ..hardware.cluster import Cluster
from ..model_profile.profile import LayerProfile, ModelProfile, training_mode
from .constants import COUNTS, Constants
from .training_setup import TrainingSetup


@dataclass(frozen=True)
class Job:
    """A model, how it is trained, and the machines with their rates."""

    profile: ModelProfile
    setup: TrainingSetup
    cluster: Cluster
    known: Constants

    @property
    def peak(self) -> float:
        """Operations per second of one GPU by its datasheet."""
        return self.cluster.gpu.bf16_tflops * 1e12

    @property
    def bandwidth(self) -> float:
        """Bytes per second that element-wise operations move."""
        return self.cluster.gpu.memory_gbs * 1e9 * self.known.memory

    @property
    def activation_bytes(self) -> float:
        """Bytes of a micro-batch's activations between two layers on one rank."""
        return self.setup.value_bytes * self.setup.tokens_per_pass * self.profile.hidden_size

    def divided(self, operations: float) -> float:
        """Return the seconds of products that are split over tensor-parallel ranks and have many rows."""
        return operations / self.setup.layout.tensor / (self.peak * self.known.matmul)


def kernel(attention: str, masked: bool, known: Container[str]) -> str:
    """Return the kernel, among the `known` of a kind of GPU, that computes `Model.attention`, a fused implementation.

    If cuDNN's is among them, torch 2.13's SDPA uses it (compute capability 9.0 and 10.0:
    `check_prefer_cudnn_attention` in `sdp_utils.cpp`).
    """
    if attention == "sdpa":
        return "cudnn" if "cudnn" in known else "efficient" if masked else "flash_2"
    if attention == "flash_attention_3" and "flash_3" in known:
        return "flash_3"
    return "flex" if attention == "flex_attention" else "flash_2"  # also for `varlen`, torch's copy of it


def implementation(setup: TrainingSetup) -> str:
    """Return `Model.attention`, with `auto` resolved as in `training.model.attention` on a GPU."""
    if setup.attention != "auto":
        return setup.attention
    return "varlen" if setup.packing and setup.layout.pipeline == 1 else "sdpa"


def attention_seconds(job: Job, kind: LayerProfile) -> tuple[float, float]:
    """Return the seconds of a layer's attention (scores and values), for the forward and the backward pass."""
    setup, known, length = job.setup, job.known, float(job.setup.sequence_length)
    if known.cpu:  # each score costs time by itself, however narrow the heads are
        heads = job.profile.attention_heads
        keys = length if setup.packing or length <= COUNTS.cpu_block else (length + COUNTS.cpu_block) / 2
        scores = setup.tokens_per_pass * keys * heads / setup.layout.tensor if kind.attention_width else 0.0
        forward, backward = (scores * (each + wide * kind.attention_width / heads) for each, wide in known.cpu.score)
        return forward, backward
    per_key = 4 * kind.attention_width / setup.layout.tensor * setup.tokens_per_pass / job.peak
    if setup.attention == "eager":
        forward = per_key * length / known.matmul
        return forward, 2 * forward
    attention = implementation(setup)
    masked = attention == "sdpa" and (setup.packing or (kind.window is not None and kind.window <= length))
    if setup.packing and setup.document_length and not masked:  # with a mask, hidden pairs are computed as well
        length = min(length, setup.document_length)
    # Fused kernels recompute the scores in the backward pass: five products instead of four.
    ahead, back = known.kernels[kernel(attention, masked, known.kernels)]
    window = length if kind.window is None else min(kind.window, length)
    keys = length if masked else window * (1 - window / (2 * length))  # on average, as the first tokens see fewer
    each = per_key * keys * (1 + COUNTS.half_speed / length)
    return each / ahead, 2.5 * each / back


def experts_alone(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return the number of a layer's experts on one rank that are modules, computed one by one as in transformers 4."""
    if setup.software.grouped_experts:
        return 0.0
    # Weights outside routed experts are those that every token is multiplied with.
    used = kind.active_weights - min(kind.active_weights, kind.parameters - kind.expert_parameters)
    return kind.experts_per_token * kind.expert_parameters / used / setup.layout.expert if used > 0 else 0.0


def kernels(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return the number of kernels that a layer's forward pass launches on one rank."""
    found = COUNTS.kernels * (COUNTS.fused_kernels if setup.fuses else 1.0)
    if setup.lora:
        per_matrix = COUNTS.fused_adapter_kernels if setup.lora.fused else COUNTS.adapter_kernels
        per_matrix += COUNTS.dora_kernels * setup.lora.dora
        found += per_matrix * len(kind.linears) * adapted_share(kind, setup)
    return found + COUNTS.expert_kernels * experts_alone(kind, setup)


def trained_weights(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return the number of trained weights of a layer: one per module, or two per adapted matrix."""
    return 2 * len(kind.linears) * adapted_share(kind, setup) if setup.lora else kind.modules


def adapted_share(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return the share of a layer's linear layers with adapters, by width."""
    if setup.lora is None:
        return 0.0
    per_rank = kind.adapter_parameters.get(f"{training_mode(setup.lora)} rank")
    widths = sum(map(sum, kind.linears))
    return 1.0 if per_rank is None or not widths else min(1.0, per_rank / widths)


def host_seconds(kind: LayerProfile, setup: TrainingSetup, known: Constants) -> tuple[float, float]:
    """Return the host's seconds for a layer's forward pass and for its backward pass."""
    hooks, taken, launches = 0.0, 0.0, kernels(kind, setup) * known.launch
    if setup.zero_stage == 3:
        # Modules that are fetched and released: a layer's own, and two per adapter. Experts that are modules have three
        # each, and an adapter of each if all linear layers have.
        of_experts = COUNTS.expert_matrices * (3 if setup.lora else 1) * experts_alone(kind, setup)
        modules = kind.modules + 2 * len(kind.linears) * adapted_share(kind, setup) + of_experts
        hooks = modules * known.hook * (1 + known.waiting * (min(COUNTS.hook_ranks, setup.zero_ranks) - 1))
    if setup.zero_stage:
        taken = COUNTS.gradient_hook * trained_weights(kind, setup)
        taken /= setup.gradient_accumulation_steps if setup.zero_stage == 1 else 1
    return launches + hooks, COUNTS.backward_launches * launches + COUNTS.backward_hooks * hooks + taken


COMPUTE = ("matmul", "attention", "elementwise", "recomputation", "logits", "launch")
"""The components of the seconds of a layer and of the head."""


def layer_seconds(job: Job, kind: LayerProfile) -> dict[str, float]:
    """Return the seconds of a decoder layer's passes for one micro-batch, by the names in `COMPUTE`."""
    setup, known, tokens, tensor = job.setup, job.known, job.setup.tokens_per_pass, job.setup.layout.tensor
    dense = sum(map(prod, kind.linears))
    routed = max(0.0, kind.active_weights - dense)  # torch and PEFT do not count fused experts among the linear layers
    read = 2 * kind.expert_parameters / setup.layout.expert / job.bandwidth
    of_experts = max(job.divided(2 * tokens * routed), read) if routed else 0.0
    products = [0.0, 0.0, 0.0]  # forward, for the gradients of inputs, and for those of weights
    for inputs, outputs in kind.linears:
        # Tensor parallelism splits a matrix that widens by its outputs, and a matrix that narrows by its inputs.
        into, out = (inputs, outputs / tensor) if outputs > inputs else (inputs / tensor, outputs)
        for index, shape in enumerate(((tokens, out, into), (tokens, into, out), (out, into, tokens))):
            products[index] += product_seconds(job, *shape)
    share = min(1.0, kind.active_weights / dense) if dense else 0.0
    forward, to_input, to_weights = (share * each + of_experts for each in products)
    added = setup.lora.rank * sum(map(sum, kind.linears)) * adapted_share(kind, setup) if setup.lora else 0.0
    adapters = job.divided(2 * tokens * added)
    attention, attention_backward = attention_seconds(job, kind)
    moved, dora_norms, twice = _moved_bytes(job, kind) / job.bandwidth, 0.0, 0.0
    packed = dense + (0 if setup.software.grouped_experts else kind.expert_parameters / setup.layout.expert)
    weights = COUNTS.dequantized * packed / job.bandwidth if setup.quantized else 0.0
    if setup.lora and setup.lora.dora:
        adapted, rank = adapted_share(kind, setup), setup.lora.rank
        norm_bytes = COUNTS.dora_norm + (COUNTS.dequantized if setup.quantized else 0)
        operations = adapted * sum(2 * inputs * rank * (inputs + outputs) for inputs, outputs in kind.linears)
        dora_norms = norm_bytes * adapted * dense / tensor / job.bandwidth + job.divided(operations)
        results = tokens * adapted * sum(outputs for _, outputs in kind.linears) / tensor
        moved += COUNTS.dora_scale * results / job.bandwidth
        twice = adapted if setup.lora.dropout else 0.0  # products that the adapter's other input repeats
    matmul = (1 + twice) * (forward + to_input) + (0 if setup.lora else setup.trained_share * to_weights) + 3 * adapters
    forward *= 1 + twice
    once = forward + attention + moved + weights + dora_norms + adapters
    # Checkpointing computes a layer once more, and so does DPO's reference model; a teacher's computation grows with
    # its size.
    again = setup.recomputes_layers + setup.reference + setup.teacher_parameters / job.profile.parameters
    part = moved if setup.selective else 0.0
    if setup.recomputes_feed_forward:
        part = sum(map(prod, kind.feed_forward)) / dense * (forward + moved) if dense else 0.0
    ahead, behind = host_seconds(kind, setup, known)
    idle = (1 + again) * ahead + behind  # on a CPU, Python and computation share the cores
    if not known.cpu:
        back = matmul - forward + attention_backward + 2 * moved + weights + part
        idle = (1 + again) * max(0.0, ahead - once) + max(0.0, behind - back)
    return {
        "matmul": matmul,
        "attention": attention + attention_backward,
        "elementwise": 3 * moved + 2 * weights + dora_norms,
        "recomputation": again * once + part,
        "launch": (3 + again) * known.gap + idle,
    }


def head_seconds(job: Job) -> float:
    """Return the seconds of the output matrix and of the loss."""
    setup, hidden = job.setup, job.profile.hidden_size
    if setup.scores:
        return 0.0
    tokens, width = setup.labelled_share * setup.tokens_per_pass, job.profile.vocab_size / setup.layout.tensor
    tiles, per_logit = 0, COUNTS.loss
    if setup.tiles(job.profile.vocab_size):
        added = 1 / COUNTS.tile_columns + (0 if setup.lora else 1 / COUNTS.tile_tokens)
        tiles, per_logit = 1, COUNTS.tiled_loss + COUNTS.added_up * hidden * added
    passes = (2 if setup.lora else 3) + tiles + setup.reference
    one = passes * product_seconds(job, tokens, width, hidden) + per_logit * tokens * width / job.bandwidth
    return (1 + setup.further_token) * one


def product_seconds(job: Job, rows: float, columns: float, depth: float) -> float:
    """Return the seconds of a matrix product of [rows, depth] and [depth, columns]."""
    rate = job.peak * job.known.matmul * (job.known.unaligned if columns % 64 or depth % 64 else 1.0)
    waves = rows * columns / (COUNTS.product_tile * job.cluster.gpu.units)
    return 2 * rows * columns * depth / rate * (1 + job.known.waves / waves)


def _moved_bytes(job: Job, kind: LayerProfile) -> float:
    """Return the bytes that element-wise operations move in the forward pass."""
    profile, setup, known = job.profile, job.setup, job.known
    tokens, tensor, hidden = setup.tokens_per_pass, setup.layout.tensor, profile.hidden_size
    # One side of each matrix has the hidden size; the other sides add up to the layer's results.
    passes = min(known.passes, COUNTS.fused_passes) if setup.fuses else known.passes
    passes *= COUNTS.fp32_passes if setup.software.fp32_activations else 1.0
    vectors = passes * (kind.active_weights / hidden / tensor + COUNTS.residual * hidden)
    # If each head of queries and keys is normalised, as in Qwen3, two vectors of a head's width remain.
    head = kind.attention_width / profile.attention_heads
    norms = kind.parameters - kind.expert_parameters - sum(map(prod, kind.linears)) - 2 * hidden
    if head and norms == 2 * head:
        normed = head * (profile.attention_heads + profile.key_value_heads)
        vectors += (COUNTS.norm_fused if setup.fuses else COUNTS.norm) * normed / tensor
    moved = 2 * tokens * vectors
    if setup.attention == "eager" and kind.attention_width:
        moved += tokens * setup.sequence_length * profile.attention_heads / tensor * known.scores
    if lora := setup.lora:
        # An adapter reads the input, with dropout two more times, and adds to the output: two reads and a write.
        per_input, per_output = 6.0 if lora.dropout else 2.0, 6.0
        if lora.fused:  # each is read and written once over the forward and the two backward passes, in place
            per_input, per_output = per_input if lora.dropout else 4 / 3, 4 / 3
        if setup.software.fp32_adapters:
            # The input is cast to fp32 (2 + 4), with dropout read and written with a mask (4 + 4 + 1), cast back by
            # autocast (4 + 2) and read (2); the result is written (2), scaled (2 + 2) and added (2 + 2 + 2).
            per_input, per_output = 23 if lora.dropout else 14, 12
        each = sum(per_input * inputs + per_output * outputs for inputs, outputs in kind.linears)
        moved += tokens * each * adapted_share(kind, setup) / tensor
    return moved
