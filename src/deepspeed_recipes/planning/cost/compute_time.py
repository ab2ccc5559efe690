"""Compute time: seconds of a layer on one rank.

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
from ..hardware.gpus import Gpu
from ..model_profile.profile import LayerProfile, ModelProfile, training_mode
from .activations import TILE_COLUMNS, TILE_TOKENS
from .constants import Constants, Cpu
from .training_setup import TrainingSetup

Kernel = Literal["flash_2", "flash_3", "cudnn", "flex", "efficient"]

HALF_SPEED = 380
"""Sequence length at which a fused kernel reaches half of its speed: arXiv:2407.08608, figures 5 and 6, width 128
(FlashAttention-2 forward, 512 to 16k tokens: 191 to 335 TFLOP/s; -3: 292 to 616; backward: 214 to 322, 316 to 561)."""


def kernel(attention: str, masked: bool, known: Container[str]) -> Kernel:
    """Return the kernel that computes `Model.attention`.

    Args:
        attention: a fused implementation, so not `eager`.
        masked: whether attention gets a full mask.
        known: the kernels available on this kind of GPU; if cuDNN's is among them, torch 2.13's SDPA uses it (compute
            capability 9.0 and 10.0: `check_prefer_cudnn_attention` in `sdp_utils.cpp`).
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


def attention_seconds(
    kind: LayerProfile, profile: ModelProfile, tokens: float, setup: TrainingSetup, gpu: Gpu, constants: Constants
) -> tuple[float, float]:
    """Return the seconds of a layer's attention (scores and values), for the forward and the backward pass.

    Args:
        kind: the layer.
        profile: the model, with its number of heads.
        tokens: number of tokens of a micro-batch on one rank.
        setup: the training setup, with the implementation and the sequence length.
        gpu: the GPU, whose peak the shares refer to.
        constants: the shares.
    """
    if constants.cpu:
        return _attention_on_cpu(kind, tokens, setup, profile.attention_heads, constants.cpu)
    length, peak = float(setup.sequence_length), gpu.bf16_tflops * 1e12
    per_key = 4 * kind.attention_width / setup.layout.tensor * tokens / peak
    if setup.attention == "eager":
        forward = per_key * length / constants.matmul
        return forward, 2 * forward
    # Fused kernels recompute the scores in the backward pass: five products instead of four.
    if not constants.kernels:
        forward = per_key * attended_tokens(kind, length) / constants.attention
        return forward, 2.5 * forward
    attention = implementation(setup)
    masked = attention == "sdpa" and (setup.packing or (kind.window is not None and kind.window <= length))
    if setup.packing and setup.document_length and not masked:  # with a mask, hidden pairs are computed as well
        length = min(length, setup.document_length)
    keys = length if masked else attended_tokens(kind, length)
    ahead, back = constants.kernels[kernel(attention, masked, constants.kernels)]
    slowdown = 1 + HALF_SPEED / length
    return per_key * keys / ahead * slowdown, 2.5 * per_key * keys / back * slowdown


CPU_BLOCK = 512
"""Keys that torch's attention on a CPU computes at a time, masked ones included."""


def _attention_on_cpu(
    kind: LayerProfile, tokens: float, setup: TrainingSetup, heads: int, cpu: Cpu
) -> tuple[float, float]:
    """Return the seconds of a layer's attention; each score costs time by itself, however narrow the heads are."""
    if not kind.attention_width:
        return 0.0, 0.0
    length = setup.sequence_length
    keys = length if setup.packing or length <= CPU_BLOCK else (length + CPU_BLOCK) / 2
    scores = tokens * keys * heads / setup.layout.tensor
    forward, backward = (scores * (each + wide * kind.attention_width / heads) for each, wide in cpu.score)
    return forward, backward


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

ONE_BY_ONE = 2
"""Products per expert and pass on GPUs without a grouped kernel, where torch's grouped call computes one after the
other, after waiting for the experts' token counts (torch 2.13, `_grouped_mm_fallback`)."""

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


def kernels(kind: LayerProfile, setup: TrainingSetup, experts: float) -> float:
    """Return the number of kernels that a layer's forward pass launches on one rank, with `experts` experts there."""
    count = KERNELS * (FUSED if setup.fuses else 1.0)
    per_matrix = (FUSED_ADAPTER if setup.lora.fused else ADAPTER) + DORA * setup.lora.dora if setup.lora else 0
    quantized = len(kind.linears) * DEQUANTIZE if setup.quantized else 0
    return (
        count
        + per_matrix * adapted_matrices(kind, setup)
        + quantized
        + (0 if setup.software.grouped_experts else EXPERT * experts)
    )


def hooked_modules(kind: LayerProfile, setup: TrainingSetup, experts: float = 0.0) -> float:
    """Return the number of modules per layer that ZeRO-3 fetches and releases: its own, and two per adapter.

    Experts that are modules, as in transformers 4, have three each, and an adapter of each if all linear layers have.
    """
    each = 0 if setup.software.grouped_experts else EXPERT_MATRICES * (3 if setup.lora else 1)
    return kind.modules + 2 * adapted_matrices(kind, setup) + each * experts


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


def waiting_seconds(experts: float, products: float, setup: TrainingSetup, constants: Constants) -> float:
    """Return the seconds of a pass in which the GPU waits for the next expert's product to be launched.

    Args:
        experts: number of the layer's experts on one rank.
        products: seconds of their products in the pass.
        setup: the training setup, with grouped experts or not.
        constants: the seconds per kernel.
    """
    # torch computes all experts in one kernel on compute capability 9 and 10, where it also uses cuDNN's attention.
    in_one_kernel = setup.precision == "bf16" and "cudnn" in constants.kernels
    if not setup.software.grouped_experts or in_one_kernel:
        return 0.0
    return max(0.0, ONE_BY_ONE * experts * constants.launch - products)


def host_seconds(
    kind: LayerProfile, setup: TrainingSetup, constants: Constants, experts: float = 0.0
) -> tuple[float, float]:
    """Return the host's seconds for a layer's forward pass and for its backward pass.

    Args:
        kind: the layer.
        setup: the training setup; adapters, 4-bit weights, ungrouped experts and ZeRO-3 add host time.
        constants: the seconds per kernel and per module that ZeRO-3 fetches.
        experts: number of the layer's experts on one rank.
    """
    others = min(NODE, setup.zero_ranks) - 1
    hook = constants.hook * (1 + constants.waiting * others) if setup.zero_stage == 3 else 0.0
    hooks = hooked_modules(kind, setup, experts) * hook
    launches = kernels(kind, setup, experts) * constants.launch
    cpu = constants.cpu
    gradient = cpu.gradient_hook if cpu else GRADIENT_HOOK
    taken = 0.0 if setup.software.fsdp or not setup.zero_stage else gradient * trained_weights(kind, setup)
    if setup.zero_stage == 1:
        taken /= setup.gradient_accumulation_steps
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


@dataclass(frozen=True)
class ComputeSeconds:
    """Seconds of one micro-batch on one rank, for the forward and the backward pass."""

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    """Bound by memory bandwidth: norms, activation functions, residual sums, adapters, 4-bit weights."""
    recomputation: float = 0.0
    logits: float = 0.0
    launch: float = 0.0
    """Time in which the GPU waits for its next kernel."""

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return self.matmul + self.attention + self.elementwise + self.recomputation + self.logits + self.launch

    def __add__(self, other: "ComputeSeconds") -> "ComputeSeconds":
        return ComputeSeconds(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def __mul__(self, times: int) -> "ComputeSeconds":
        return ComputeSeconds(*(getattr(self, name) * times for name in self.__dataclass_fields__))


def model_flops(profile: ModelProfile, setup: TrainingSetup) -> float:
    """Return the operations of an optimizer step over all ranks, counted as in `training.callbacks.metrics` for MFU.

    They are two per weight in the forward pass, two for the gradient of the input and two for that of a trained weight.
    Recomputation is not counted, since it is not progress; windows of attention are ignored.
    """
    per_weight = 4 + 2 * setup.trained_share if setup.lora is None else 4
    layers = profile.layer_counts
    weights = sum(count * kind.active_weights for kind, count in layers) + profile.hidden_size * profile.vocab_size
    adapters = sum(count * linear_adapter_parameters(kind, setup) for kind, count in layers)
    attention = 6 * sum(count * kind.attention_width for kind, count in layers) * setup.sequence_length
    return (per_weight * weights + 6 * adapters + attention) * setup.tokens_per_step


def linear_adapter_parameters(kind: LayerProfile, setup: TrainingSetup) -> int:
    """Return the number of adapter parameters on all linear layers of a decoder layer, or 0 without adapters."""
    return setup.lora.rank * sum(sum(shape) for shape in kind.linears) if setup.lora else 0


def layer_seconds(
    kind: LayerProfile, profile: ModelProfile, setup: TrainingSetup, gpu: Gpu, constants: Constants
) -> ComputeSeconds:
    """Return the seconds of a decoder layer."""
    tokens = tokens_per_pass(setup)
    forward, to_input, to_weights = _products(kind, tokens, setup, gpu, constants)
    matmul = forward + to_input + (0 if setup.lora else setup.trained_share * to_weights)
    attention, attention_backward = attention_seconds(kind, profile, tokens, setup, gpu, constants)
    bandwidth = gpu.memory_gbs * 1e9 * constants.memory
    moved = _moved_bytes(kind, profile, tokens, setup, constants) / bandwidth
    weights = DEQUANTIZED * _quantized_weights(kind, setup) / (gpu.memory_gbs * 1e9 * constants.dequantize)
    norms, scaled, twice = _dora_seconds(kind, tokens, setup, gpu, constants)
    matmul += twice * (forward + to_input) + 3 * _adapter_product(kind, tokens, setup, gpu, constants)
    forward *= 1 + twice
    moved += scaled
    once = forward + attention + moved + weights + norms + _adapter_product(kind, tokens, setup, gpu, constants)
    # Checkpointing computes a layer once more, and so does DPO's reference model; a teacher's computation grows with
    # its size.
    again = setup.recomputes_layers + setup.reference + setup.teacher_parameters / profile.parameters
    part = moved if setup.selective else 0.0
    if setup.recomputes_feed_forward:
        part = feed_forward_share(kind) * (forward + moved)
    back = matmul - forward + attention_backward + 2 * moved + weights + part
    passes = 3 + again
    experts = experts_on_rank(kind, setup)
    ahead, behind = host_seconds(kind, setup, constants, experts)
    if constants.cpu:  # Python and computation share the cores
        idle = (1 + again) * ahead + behind
    else:
        idle = (1 + again) * max(0.0, ahead - once) + max(0.0, behind - back)
    waiting = waiting_seconds(experts, _expert_product(kind, tokens, setup, gpu, constants), setup, constants)
    return ComputeSeconds(
        matmul=matmul,
        attention=attention + attention_backward,
        elementwise=3 * moved + 2 * weights + norms,
        recomputation=again * once + part,
        launch=passes * (constants.gap + waiting) + idle,
    )


def _dora_seconds(
    kind: LayerProfile, tokens: float, setup: TrainingSetup, gpu: Gpu, constants: Constants
) -> tuple[float, float, float]:
    """Return what DoRA adds to a layer.

    These are the seconds of its weights' norms in a forward pass, those of scaling outputs in any pass, and the share
    of the products that are computed a second time, because the adapter's input has dropout.
    """
    if setup.lora is None or not setup.lora.dora:
        return 0.0, 0.0, 0.0
    share, rank, bandwidth = adapted_share(kind, setup), setup.lora.rank, gpu.memory_gbs * 1e9 * constants.memory
    weights = share * sum(map(prod, kind.linears)) / setup.layout.tensor
    operations = share * sum(2 * inputs * rank * (inputs + outputs) for inputs, outputs in kind.linears)
    norms = (DORA_NORM + (DEQUANTIZED if setup.quantized else 0)) * weights / bandwidth
    norms += operations / setup.layout.tensor / (gpu.bf16_tflops * 1e12 * constants.matmul)
    outputs = share * sum(outputs for _, outputs in kind.linears) / setup.layout.tensor
    return norms, DORA_SCALE * tokens * outputs / bandwidth, share if setup.lora.dropout else 0.0


def feed_forward_share(kind: LayerProfile) -> float:
    """Return the share of a layer's linear weights in its feed-forward part, which some settings recompute."""
    return sum(map(prod, kind.feed_forward)) / sum(map(prod, kind.linears)) if kind.linears else 0.0


def _quantized_weights(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return the number of 4-bit weights of a layer on one rank, including experts only if each is its own module."""
    if not setup.quantized:
        return 0.0
    experts = 0.0 if setup.software.grouped_experts else kind.expert_parameters / setup.layout.expert
    return sum(map(prod, kind.linears)) + experts


def tokens_per_pass(setup: TrainingSetup) -> float:
    """Return the number of tokens that go through a layer at once on one rank."""
    return setup.sequences_per_pass * setup.sequence_length / setup.layout.sequence


def experts_on_rank(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return the number of a layer's experts on one rank, or 0 if it has none."""
    # Weights outside routed experts are those that every token is multiplied with.
    used = kind.active_weights - min(kind.active_weights, kind.parameters - kind.expert_parameters)
    return kind.experts_per_token * kind.expert_parameters / used / setup.layout.expert if used > 0 else 0.0


def head_seconds(profile: ModelProfile, setup: TrainingSetup, gpu: Gpu, constants: Constants) -> ComputeSeconds:
    """Return the seconds of the output matrix and of the loss."""
    if setup.scores:
        return ComputeSeconds()
    tokens = setup.labelled_share * tokens_per_pass(setup)
    width = profile.vocab_size / setup.layout.tensor
    passes = (2 if setup.lora else 3) + setup.tiles(profile.vocab_size) + setup.reference
    products = passes * _product(tokens, width, profile.hidden_size, gpu, constants)
    moved = LOSS * tokens * width
    if setup.tiles(profile.vocab_size):
        added = 1 / TILE_COLUMNS + (0 if setup.lora else 1 / TILE_TOKENS)
        moved = (TILED_LOSS + ADDED_UP * profile.hidden_size * added) * tokens * width
    return ComputeSeconds(logits=products + moved / (gpu.memory_gbs * 1e9 * constants.memory))


def _product(rows: float, columns: float, depth: float, gpu: Gpu, constants: Constants) -> float:
    """Return the seconds of a matrix product of [rows, depth] and [depth, columns]."""
    if constants.cpu:
        return 2 * rows * columns * depth / _cpu_rate(constants.cpu, (rows * columns * depth) ** (1 / 3))
    rate = gpu.bf16_tflops * 1e12 * constants.matmul
    if any(size % 64 for size in (columns, depth)):
        rate *= constants.unaligned
    waves = rows * columns / (TILE * gpu.units)
    return 2 * rows * columns * depth / rate * (1 + constants.waves / waves)


def _cpu_rate(cpu: Cpu, side: float) -> float:
    """Return the operations per second of a product as large as a square one of this side."""
    for (small, slow), (large, fast) in pairwise(cpu.products):
        if side <= large:
            return slow + (fast - slow) * max(0.0, log(side / small) / log(large / small))
    return cpu.products[-1][1]


def _products(
    kind: LayerProfile, tokens: float, setup: TrainingSetup, gpu: Gpu, constants: Constants
) -> tuple[float, float, float]:
    """Return the seconds of a layer's products: forward, for the gradients of inputs, and for those of weights."""
    seconds = [0.0, 0.0, 0.0]
    tensor = setup.layout.tensor
    for inputs, outputs in kind.linears:
        # Tensor parallelism splits a matrix that widens by its outputs, and a matrix that narrows by its inputs.
        shape = (inputs, outputs / tensor) if outputs > inputs else (inputs / tensor, outputs)
        for index, (rows, columns, depth) in enumerate(
            ((tokens, shape[1], shape[0]), (tokens, shape[0], shape[1]), (shape[1], shape[0], tokens))
        ):
            seconds[index] += _product(rows, columns, depth, gpu, constants)
    in_linears = sum(map(prod, kind.linears))
    others = _expert_product(kind, tokens, setup, gpu, constants)
    share = min(1.0, kind.active_weights / in_linears) if in_linears else 0.0
    forward, to_input, to_weights = (share * each + others for each in seconds)
    return forward, to_input, to_weights


def _adapter_product(kind: LayerProfile, tokens: float, setup: TrainingSetup, gpu: Gpu, constants: Constants) -> float:
    """Return the seconds of one pass's products with the two matrices of each adapter."""
    if setup.lora is None:
        return 0.0
    weights = linear_adapter_parameters(kind, setup) * adapted_share(kind, setup) / setup.layout.tensor
    return 2 * tokens * weights / (gpu.bf16_tflops * 1e12 * constants.matmul)


def _expert_product(kind: LayerProfile, tokens: float, setup: TrainingSetup, gpu: Gpu, constants: Constants) -> float:
    """Return the seconds of one pass's products with fused experts, which are not linear layers for torch and PEFT."""
    rest = max(0.0, kind.active_weights - sum(map(prod, kind.linears)))
    if not rest:
        return 0.0
    rate = gpu.bf16_tflops * 1e12 * constants.matmul
    computed = 2 * tokens * rest / setup.layout.tensor / rate * _half_empty_tiles(kind, tokens, setup)
    read = 2 * kind.expert_parameters / setup.layout.expert / (gpu.memory_gbs * 1e9 * constants.memory)
    return max(computed, read)


def _half_empty_tiles(kind: LayerProfile, tokens: float, setup: TrainingSetup) -> float:
    """Return the factor by which partly filled tiles, which are computed as a whole, slow the experts' products."""
    experts = experts_on_rank(kind, setup)
    if not experts:
        return 1.0
    tokens_per_expert = tokens * kind.experts_per_token / experts
    return min(1 + EXPERT_ROWS / 2 / tokens_per_expert, EXPERT_ROWS)


def _moved_bytes(
    kind: LayerProfile, profile: ModelProfile, tokens: float, setup: TrainingSetup, constants: Constants
) -> float:
    """Return the bytes that element-wise operations move in the forward pass."""
    tensor, hidden = setup.layout.tensor, profile.hidden_size
    # One side of each matrix has the hidden size; the other sides add up to the layer's results.
    passes = min(constants.passes, FUSED_PASSES) if setup.fuses else constants.passes
    passes *= FP32_PASSES if setup.software.fp32_activations else 1.0
    moved = 2 * tokens * passes * (kind.active_weights / hidden / tensor + RESIDUAL * hidden)
    moved += 2 * tokens * (NORM_FUSED if setup.fuses else NORM) * _normed_heads(kind, profile) / tensor
    if setup.attention == "eager" and kind.attention_width:
        moved += tokens * setup.sequence_length * profile.attention_heads / tensor * constants.scores
    moved += 2 * tokens * ROUTED * kind.experts_per_token * hidden
    if setup.lora:
        moved += tokens * _adapter_bytes(kind, setup, setup.lora) * adapted_share(kind, setup) / tensor
    return moved


def _normed_heads(kind: LayerProfile, profile: ModelProfile) -> float:
    """Return the width of queries and keys if each head of them is normalised, as in Qwen3, otherwise 0."""
    head = kind.attention_width / profile.attention_heads
    norms = kind.parameters - kind.expert_parameters - sum(map(prod, kind.linears)) - 2 * profile.hidden_size
    return head * (profile.attention_heads + profile.key_value_heads) if head and norms == 2 * head else 0.0


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
