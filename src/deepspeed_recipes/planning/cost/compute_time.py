"""Compute time: seconds of a layer, and of the head, on one rank.

They follow from its arithmetic and the bytes that it moves (a roofline), from the attention kernel of the GPU, and from
the time in which Python launches kernels, which matters if the GPU is faster.

A kernel's share of the peak grows with the sequence length, since blocks on the diagonal are computed as a whole and
short sequences leave multiprocessors idle. The shares in `constants.json` are for long sequences with causal masks.
"""

from collections.abc import Container
from dataclasses import dataclass
from itertools import pairwise
from math import log, prod
from typing import Literal

from ...recipe.recipe import Lora
from ..hardware.cluster import Cluster
from ..model_profile.profile import LayerProfile, ModelProfile, training_mode
from .activations import TILE_COLUMNS, TILE_TOKENS
from .constants import Constants
from .training_setup import TrainingSetup

Kernel = Literal["flash_2", "flash_3", "cudnn", "flex", "efficient"]


@dataclass(frozen=True)
class Job:
    """A model, how it is trained, and the machines with their rates."""

    profile: ModelProfile
    setup: TrainingSetup
    cluster: Cluster
    known: Constants

    @property
    def tokens(self) -> float:
        """Tokens that go through a layer at once on one rank."""
        return self.setup.sequences_per_pass * self.setup.sequence_length / self.setup.layout.sequence

    @property
    def peak(self) -> float:
        """Operations per second of one GPU by its datasheet."""
        return self.cluster.gpu.bf16_tflops * 1e12

    @property
    def bandwidth(self) -> float:
        """Bytes per second that element-wise operations move."""
        return self.cluster.gpu.memory_gbs * 1e9 * self.known.memory


HALF_SPEED = 380
"""Sequence length at which a fused kernel reaches half of its speed: arXiv:2407.08608, figures 5 and 6, width 128
(FlashAttention-2 forward, 512 to 16k tokens: 191 to 335 TFLOP/s; -3: 292 to 616; backward: 214 to 322, 316 to 561)."""
CPU_BLOCK = 512
"""Keys that torch's attention on a CPU computes at a time, masked ones included."""


def kernel(attention: str, masked: bool, known: Container[str]) -> Kernel:
    """Return the kernel that computes `Model.attention`, a fused implementation.

    `known` are the kernels of this kind of GPU; if cuDNN's is among them, torch 2.13's SDPA uses it (compute capability
    9.0 and 10.0: `check_prefer_cudnn_attention` in `sdp_utils.cpp`).
    """
    if attention == "sdpa":
        return "cudnn" if "cudnn" in known else "efficient" if masked else "flash_2"
    if attention == "flex_attention":
        return "flex"
    if attention == "flash_attention_3" and "flash_3" in known:
        return "flash_3"
    return "flash_2"  # also for `varlen`, torch's copy of it


def implementation(setup: TrainingSetup) -> str:
    """Return `Model.attention`, with `auto` resolved as in `training.model.attention` on a GPU."""
    if setup.attention != "auto":
        return setup.attention
    return "varlen" if setup.packing and setup.layout.pipeline == 1 else "sdpa"


def attended_tokens(kind: LayerProfile, length: float) -> float:
    """Return the average number of tokens that a token attends to, causally: half of its sequence, or its window."""
    if kind.window is None or kind.window >= length:
        return length / 2
    return kind.window * (1 - kind.window / (2 * length))


def attention_seconds(job: Job, kind: LayerProfile) -> tuple[float, float]:
    """Return the seconds of a layer's attention (scores and values), for the forward and the backward pass."""
    setup, known, length = job.setup, job.known, float(job.setup.sequence_length)
    if known.cpu:  # each score costs time by itself, however narrow the heads are
        heads = job.profile.attention_heads
        keys = length if setup.packing or length <= CPU_BLOCK else (length + CPU_BLOCK) / 2
        scores = job.tokens * keys * heads / setup.layout.tensor if kind.attention_width else 0.0
        forward, backward = (scores * (each + wide * kind.attention_width / heads) for each, wide in known.cpu.score)
        return forward, backward
    per_key = 4 * kind.attention_width / setup.layout.tensor * job.tokens / job.peak
    if setup.attention == "eager":
        forward = per_key * length / known.matmul
        return forward, 2 * forward
    # Fused kernels recompute the scores in the backward pass: five products instead of four.
    if not known.kernels:
        forward = per_key * attended_tokens(kind, length) / known.attention
        return forward, 2.5 * forward
    attention = implementation(setup)
    masked = attention == "sdpa" and (setup.packing or (kind.window is not None and kind.window <= length))
    if setup.packing and setup.document_length and not masked:  # with a mask, hidden pairs are computed as well
        length = min(length, setup.document_length)
    ahead, back = known.kernels[kernel(attention, masked, known.kernels)]
    each = per_key * (length if masked else attended_tokens(kind, length)) * (1 + HALF_SPEED / length)
    return each / ahead, 2.5 * each / back


KERNELS = 100
"""Kernels of a Llama layer's forward pass in transformers 5.22.2, products and memory operations included."""
ADAPTER, FUSED_ADAPTER = 6, 3
"""Kernels per adapted matrix: dropout, two products, the scale, the sum, and a cast; with `lora.fused` the first
three."""
DORA = 14
"""More of them with DoRA: the unit matrix, two products, the sum, the norm, its ratio, and what scales the outputs."""
DEQUANTIZE = 3
"""Kernels per 4-bit matrix: for the scales of its blocks, their offset, and the weights."""
EXPERT = 14
"""Kernels per expert that is computed alone: finding and gathering its tokens, three products, the activation function,
the weighting and the sum into the result."""
EXPERT_MATRICES = 3
"""Matrices of a gated expert."""
FUSED = 0.5
"""Share of a layer's kernels that remains if element-wise operations are fused: 7 products, attention, and one for each
norm, the rotary embedding, the activation function and the sums, with their copies."""
NODE = 8
"""Ranks of a node, the maximum that a rank's hooks wait for: more ranks were not measured."""
BACKWARD_LAUNCHES, BACKWARD_HOOKS = 2.0, 0.7
"""Ratio of a layer's backward to its forward pass. Launches follow the number of operations. ZeRO-3's hooks were
measured: 2.2 ms backward and 3.1 ms forward more per layer than under ZeRO-1 (deepspeed 0.19.8, a Llama of 16 layers
64 wide, two CPU ranks, process time)."""
GRADIENT_HOOK = 3e-5
"""Seconds in which ZeRO processes a trained weight's gradient in a backward pass, at stage 1 only in the last pass of a
step (deepspeed 0.19.8, Llamas of 8 and 24 layers 64 wide, one CPU rank, compared with plain torch: 20 to 45 us, with
all weights trained or with adapters)."""


def experts_on_rank(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return the number of a layer's experts on one rank, or 0 if it has none."""
    # Weights outside routed experts are those that every token is multiplied with.
    used = kind.active_weights - min(kind.active_weights, kind.parameters - kind.expert_parameters)
    return kind.experts_per_token * kind.expert_parameters / used / setup.layout.expert if used > 0 else 0.0


def experts_alone(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return the number of these that are modules and computed one by one, as in transformers 4."""
    return 0.0 if setup.software.grouped_experts else experts_on_rank(kind, setup)


def kernels(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return the number of kernels that a layer's forward pass launches on one rank."""
    per_matrix = (FUSED_ADAPTER if setup.lora.fused else ADAPTER) + DORA * setup.lora.dora if setup.lora else 0
    matrices = per_matrix * adapted_matrices(kind, setup) + (DEQUANTIZE * len(kind.linears) if setup.quantized else 0)
    return KERNELS * (FUSED if setup.fuses else 1.0) + matrices + EXPERT * experts_alone(kind, setup)


def hooked_modules(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return the number of modules per layer that ZeRO-3 fetches and releases: its own, and two per adapter.

    Experts that are modules have three each, and an adapter of each if all linear layers have.
    """
    of_experts = EXPERT_MATRICES * (3 if setup.lora else 1) * experts_alone(kind, setup)
    return kind.modules + 2 * adapted_matrices(kind, setup) + of_experts


def trained_weights(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return the number of trained weights of a layer: one per module, or two per adapted matrix."""
    return 2 * adapted_matrices(kind, setup) if setup.lora else kind.modules


def adapted_matrices(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return the number of a layer's linear layers with adapters."""
    return len(kind.linears) * adapted_share(kind, setup) if setup.lora else 0.0


def adapted_share(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return the share of a layer's linear layers with adapters, by width."""
    per_rank = kind.adapter_parameters.get(f"{training_mode(setup.lora)} rank")
    widths = sum(map(sum, kind.linears))
    return 1.0 if per_rank is None or not widths else min(1.0, per_rank / widths)


def host_seconds(kind: LayerProfile, setup: TrainingSetup, known: Constants) -> tuple[float, float]:
    """Return the host's seconds for a layer's forward pass and for its backward pass."""
    others, cpu = min(NODE, setup.zero_ranks) - 1, known.cpu
    hook = known.hook * (1 + known.waiting * others) if setup.zero_stage == 3 else 0.0
    hooks, launches = hooked_modules(kind, setup) * hook, kernels(kind, setup) * known.launch
    taken = 0.0
    if setup.zero_stage and not setup.software.fsdp:
        taken = (cpu.gradient_hook if cpu else GRADIENT_HOOK) * trained_weights(kind, setup)
        taken /= setup.gradient_accumulation_steps if setup.zero_stage == 1 else 1
    by_launches, by_hooks = (cpu.backward_launches, cpu.backward_hooks) if cpu else (BACKWARD_LAUNCHES, BACKWARD_HOOKS)
    return launches + hooks, by_launches * launches + by_hooks * hooks + taken


TILE = 128 * 256
"""Elements of a matrix product's result that a streaming multiprocessor computes at a time: cuBLAS's largest tile."""
RESIDUAL = 10
"""Vectors of the hidden size that a layer's norms and residual sums read and write: two of each, 2 and 3 vectors."""
FUSED_PASSES = 1.0
"""`Constants.passes` if each norm, rotary embedding and activation function is one kernel: 4, 2.5 and 10.5 vectors of
the hidden size, and 6 for residual sums, over the 23 of one pass; for llm-foundry, which torch compiled, 0.96 fits."""
NORM, NORM_FUSED = 18, 2
"""Vectors that a norm reads and writes, operation by operation (half of the two norms' 36), and as one kernel."""
FP32_PASSES = 2.2
"""Factor on the bytes moved if activations between 4-bit matrices are in fp32. For a Llama layer, in vectors of the
hidden size: norms 28, residual sums 12, rotary embedding 30, activation function 35, casts of inputs 28 and of outputs
31, over the 74.5 in bf16."""
ROUTED = 7
"""Vectors of the hidden size read and written for each expert of a token: gathering (2), weighting (2), summing (3)."""
EXPERT_ROWS = 128
"""Rows of a tile of the experts' product: the last tile of each expert is half empty on average."""
DEQUANTIZED = 2.5
"""Bytes moved per 4-bit weight each time that it is used: half a byte read and two written. Reading them again in the
product takes no additional time, as with any other weight."""
DORA_NORM = 14
"""Bytes moved per adapted weight in a forward pass with DoRA: the product of both adapter matrices is written (2),
scaled (4) and added to the weight (6), and the norm of the sum is read (2) (peft 0.19, lora/dora.py)."""
DORA_SCALE = 14
"""Bytes moved per token, output and pass: the output is scaled (4), the adapter's output once more (4), and the sum is
read twice and written (6)."""
FUSED_ADAPTER_BYTES = 4 / 3
"""Bytes moved per pass and output of a fused adapter, and per input without dropout: each is read and written once over
the forward and the two backward passes (training/model/lora.py)."""
LOSS = 30
"""Bytes moved per logit: 2 written, 12 + 12 for the fp32 copy and its softmax in both passes, and 4 read back."""
TILED_LOSS = 14
"""The same in tiles: written and read in each pass, turned into its gradient in place, and read by two products (trl,
kernels/chunked_logprob.py, with Triton)."""
ADDED_UP = 8
"""Bytes moved per element of the fp32 gradients to which each tile adds: read and written."""

COMPUTE = ("matmul", "attention", "elementwise", "recomputation", "logits", "launch")
"""The components of the seconds of a layer and of the head."""


def linear_adapter_parameters(kind: LayerProfile, setup: TrainingSetup) -> int:
    """Return the number of adapter parameters on all linear layers of a decoder layer, or 0 without adapters."""
    return setup.lora.rank * sum(sum(shape) for shape in kind.linears) if setup.lora else 0


def layer_seconds(job: Job, kind: LayerProfile) -> dict[str, float]:
    """Return the seconds of a decoder layer's passes for one micro-batch, by the names in `COMPUTE`."""
    setup, known, tokens, tensor = job.setup, job.known, job.tokens, job.setup.layout.tensor
    dense = sum(map(prod, kind.linears))
    routed = max(0.0, kind.active_weights - dense)  # torch and PEFT do not count fused experts among the linear layers
    read = 2 * kind.expert_parameters / setup.layout.expert / job.bandwidth
    tiles = 1.0
    if experts := experts_on_rank(kind, setup):  # partly filled tiles are computed as a whole
        tiles = min(1 + EXPERT_ROWS / 2 * experts / (tokens * kind.experts_per_token), EXPERT_ROWS)
    of_experts = max(_operations_seconds(job, 2 * tokens * routed) * tiles, read) if routed else 0.0
    share = min(1.0, kind.active_weights / dense) if dense else 0.0
    forward, to_input, to_weights = (share * each + of_experts for each in _products(job, kind))
    adapters = linear_adapter_parameters(kind, setup) * adapted_share(kind, setup)
    adapters = _operations_seconds(job, 2 * tokens * adapters)
    attention, attention_backward = attention_seconds(job, kind)
    moved, dora_norms, twice = _moved_bytes(job, kind) / job.bandwidth, 0.0, 0.0
    packed = dense + (0 if setup.software.grouped_experts else kind.expert_parameters / setup.layout.expert)
    weights = DEQUANTIZED * packed / job.bandwidth if setup.quantized else 0.0
    if setup.lora and setup.lora.dora:
        adapted, rank = adapted_share(kind, setup), setup.lora.rank
        norm_bytes = (DORA_NORM + (DEQUANTIZED if setup.quantized else 0)) * adapted * dense / tensor
        operations = adapted * sum(2 * inputs * rank * (inputs + outputs) for inputs, outputs in kind.linears)
        dora_norms = norm_bytes / job.bandwidth + _operations_seconds(job, operations)
        moved += DORA_SCALE * tokens * adapted * sum(outputs for _, outputs in kind.linears) / tensor / job.bandwidth
        twice = adapted if setup.lora.dropout else 0.0  # products that the adapter's other input repeats
    matmul = (1 + twice) * (forward + to_input) + (0 if setup.lora else setup.trained_share * to_weights) + 3 * adapters
    forward *= 1 + twice
    once = forward + attention + moved + weights + dora_norms + adapters
    # Checkpointing computes a layer once more, and so does DPO's reference model; a teacher's computation grows with
    # its size.
    again = setup.recomputes_layers + setup.reference + setup.teacher_parameters / job.profile.parameters
    part = moved if setup.selective else 0.0
    if setup.recomputes_feed_forward:
        part = feed_forward_share(kind) * (forward + moved)
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


def feed_forward_share(kind: LayerProfile) -> float:
    """Return the share of a layer's linear weights in its feed-forward part, which some settings recompute."""
    return sum(map(prod, kind.feed_forward)) / sum(map(prod, kind.linears)) if kind.linears else 0.0


def head_seconds(job: Job) -> float:
    """Return the seconds of the output matrix and of the loss."""
    setup, profile = job.setup, job.profile
    if setup.scores:
        return 0.0
    tokens, width, tiles = setup.labelled_share * job.tokens, profile.vocab_size / setup.layout.tensor, 0
    per_logit = float(LOSS)
    if setup.tiles(profile.vocab_size):
        added = 1 / TILE_COLUMNS + (0 if setup.lora else 1 / TILE_TOKENS)
        tiles, per_logit = 1, TILED_LOSS + ADDED_UP * profile.hidden_size * added
    passes = (2 if setup.lora else 3) + tiles + setup.reference
    return (
        passes * product_seconds(job, tokens, width, profile.hidden_size) + per_logit * tokens * width / job.bandwidth
    )


def product_seconds(job: Job, rows: float, columns: float, depth: float) -> float:
    """Return the seconds of a matrix product of [rows, depth] and [depth, columns]."""
    operations, cpu = 2 * rows * columns * depth, job.known.cpu
    if cpu:  # as fast as a square product of the same size
        side = (rows * columns * depth) ** (1 / 3)
        for (small, slow), (large, fast) in pairwise(cpu.products):
            if side <= large:
                return operations / (slow + (fast - slow) * max(0.0, log(side / small) / log(large / small)))
        return operations / cpu.products[-1][1]
    rate = job.peak * job.known.matmul * (job.known.unaligned if columns % 64 or depth % 64 else 1.0)
    waves = rows * columns / (TILE * job.cluster.gpu.units)
    return operations / rate * (1 + job.known.waves / waves)


def _operations_seconds(job: Job, operations: float) -> float:
    """Return the seconds of products that are split over tensor-parallel ranks and have many rows."""
    return operations / job.setup.layout.tensor / (job.peak * job.known.matmul)


def _products(job: Job, kind: LayerProfile) -> list[float]:
    """Return the seconds of all linear layers: forward, for the gradients of inputs, and for those of weights."""
    seconds, tokens, tensor = [0.0, 0.0, 0.0], job.tokens, job.setup.layout.tensor
    for inputs, outputs in kind.linears:
        # Tensor parallelism splits a matrix that widens by its outputs, and a matrix that narrows by its inputs.
        into, out = (inputs, outputs / tensor) if outputs > inputs else (inputs / tensor, outputs)
        for index, shape in enumerate(((tokens, out, into), (tokens, into, out), (out, into, tokens))):
            seconds[index] += product_seconds(job, *shape)
    return seconds


def _moved_bytes(job: Job, kind: LayerProfile) -> float:
    """Return the bytes that element-wise operations move in the forward pass."""
    profile, setup, known = job.profile, job.setup, job.known
    tokens, tensor, hidden = job.tokens, setup.layout.tensor, profile.hidden_size
    # One side of each matrix has the hidden size; the other sides add up to the layer's results.
    passes = min(known.passes, FUSED_PASSES) if setup.fuses else known.passes
    passes *= FP32_PASSES if setup.software.fp32_activations else 1.0
    vectors = passes * (kind.active_weights / hidden / tensor + RESIDUAL * hidden)
    vectors += ROUTED * kind.experts_per_token * hidden
    # If each head of queries and keys is normalised, as in Qwen3, two vectors of a head's width remain.
    head = kind.attention_width / profile.attention_heads
    norms = kind.parameters - kind.expert_parameters - sum(map(prod, kind.linears)) - 2 * hidden
    if head and norms == 2 * head:
        normed = head * (profile.attention_heads + profile.key_value_heads)
        vectors += (NORM_FUSED if setup.fuses else NORM) * normed / tensor
    moved = 2 * tokens * vectors
    if setup.attention == "eager" and kind.attention_width:
        moved += tokens * setup.sequence_length * profile.attention_heads / tensor * known.scores
    if setup.lora:
        moved += tokens * _adapter_bytes(kind, setup, setup.lora) * adapted_share(kind, setup) / tensor
    return moved


def _adapter_bytes(kind: LayerProfile, setup: TrainingSetup, lora: Lora) -> float:
    """Return the bytes per token and pass that adapters on all linear layers of a layer move."""
    # An adapter reads the input, with dropout two more times, and adds to the output: two reads and a write.
    per_input, per_output = 6.0 if lora.dropout else 2.0, 6.0
    if lora.fused:  # products add to the output, and to the input's gradient, in place
        per_input, per_output = per_input if lora.dropout else FUSED_ADAPTER_BYTES, FUSED_ADAPTER_BYTES
    if setup.software.fp32_adapters:
        # The input is cast to fp32 (2 + 4), with dropout read and written with a mask (4 + 4 + 1), cast back by
        # autocast (4 + 2) and read (2); the result is written (2), scaled (2 + 2) and added (2 + 2 + 2).
        per_input, per_output = 23 if lora.dropout else 14, 12
    return sum(per_input * inputs + per_output * outputs for inputs, outputs in kind.linears)
