"""Compute time: a layer's arithmetic and the bytes it moves on one rank, and the seconds they take (a roofline)."""

from dataclasses import dataclass
from math import prod

from ..hardware.gpus import Gpu
from ..model_profile.profile import LayerProfile, ModelProfile
from .constants import Constants
from .training_setup import TrainingSetup

TILE = 128 * 256
"""Elements of a matrix product's result that one streaming multiprocessor computes at a time: cuBLAS's largest tile."""
RESIDUAL = 10
"""Vectors of the model's width that a layer's norms and residual sums read and write: two of each, 2 and 3 vectors."""
LOSS = 30
"""Bytes moved per logit: 2 written, 12 + 12 for the fp32 copy and its softmax in both directions, and 4 read back."""


@dataclass(frozen=True)
class ComputeSeconds:
    """Of one micro-batch on one rank, forward and backward pass."""

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    """Bound by memory bandwidth: norms, activation functions, residual sums, adapters, 4-bit weights."""
    recomputation: float = 0.0
    logits: float = 0.0
    launch: float = 0.0
    """In which the GPU waits for its next kernel."""

    @property
    def total(self) -> float:
        """The sum of all."""
        return self.matmul + self.attention + self.elementwise + self.recomputation + self.logits + self.launch

    def __add__(self, other: "ComputeSeconds") -> "ComputeSeconds":
        """Return the sum."""
        return ComputeSeconds(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def __mul__(self, times: int) -> "ComputeSeconds":
        """Return a multiple."""
        return ComputeSeconds(*(getattr(self, name) * times for name in self.__dataclass_fields__))


def attended_tokens(kind: LayerProfile, length: int) -> float:
    """Return how many tokens a token attends to on average, causally: half of its sequence, or its window."""
    if kind.window is None or kind.window >= length:
        return length / 2
    return kind.window * (1 - kind.window / (2 * length))


def model_flops(profile: ModelProfile, setup: TrainingSetup) -> float:
    """Return the operations of an optimizer step over all ranks, counted as `training.model.flops` does for MFU.

    Two per weight in the forward pass, two for the gradient of the input and two for that of a trained weight.
    Recomputation is not progress and not counted, and neither are windows.
    """
    per_weight = 6 if setup.lora is None else 4
    weights = sum(layer.active_weights for layer in profile.layers) + profile.hidden_size * profile.vocab_size
    adapters = sum(linear_adapter_parameters(layer, setup) for layer in profile.layers)
    attention = 6 * sum(layer.attention_width for layer in profile.layers) * setup.sequence_length
    return (per_weight * weights + 6 * adapters + attention) * setup.tokens_per_step


def linear_adapter_parameters(kind: LayerProfile, setup: TrainingSetup) -> int:
    """Return the parameters of adapters on all linear layers of a decoder layer; 0 without adapters."""
    return setup.lora.rank * sum(sum(shape) for shape in kind.linears) if setup.lora else 0


def layer_seconds(
    kind: LayerProfile, profile: ModelProfile, setup: TrainingSetup, gpu: Gpu, constants: Constants
) -> ComputeSeconds:
    """Return the seconds of a decoder layer."""
    tokens = setup.micro_batch_size * setup.sequence_length / setup.layout.sequence
    forward, to_input, to_weights = _products(kind, tokens, setup, gpu, constants)
    matmul = forward + to_input + (0 if setup.lora else to_weights)
    attention = _attention(kind, tokens, setup, gpu, constants)
    moved = _moved_bytes(kind, profile, tokens, setup, constants) / (gpu.memory_gbs * 1e9 * constants.memory)
    once = forward + attention + moved
    # Fused attention recomputes the scores in its backward pass: five products instead of four.
    backward = (4 if setup.attention == "eager" else 5) / 2
    busy = matmul + (1 + backward) * attention + 3 * moved + setup.gradient_checkpointing * once
    passes = 3 + setup.gradient_checkpointing
    return ComputeSeconds(
        matmul=matmul,
        attention=(1 + backward) * attention,
        elementwise=3 * moved,
        recomputation=setup.gradient_checkpointing * once,
        launch=passes * constants.gap + max(0.0, passes * constants.launch - busy),
    )


def head_seconds(profile: ModelProfile, setup: TrainingSetup, gpu: Gpu, constants: Constants) -> ComputeSeconds:
    """Return the seconds of the output matrix and of the loss."""
    tokens = setup.micro_batch_size * setup.sequence_length / setup.layout.sequence
    width = profile.vocab_size / setup.layout.tensor
    passes = (2 if setup.lora else 3) + setup.tiles(profile.vocab_size)
    products = passes * _product(tokens, width, profile.hidden_size, gpu, constants)
    return ComputeSeconds(logits=products + LOSS * tokens * width / (gpu.memory_gbs * 1e9 * constants.memory))


def _product(rows: float, columns: float, depth: float, gpu: Gpu, constants: Constants) -> float:
    """Return the seconds of a matrix product of [rows, depth] and [depth, columns]."""
    rate = gpu.bf16_tflops * 1e12 * constants.matmul
    if any(size % 64 for size in (columns, depth)):
        rate *= constants.unaligned
    waves = rows * columns / (TILE * gpu.units)
    return 2 * rows * columns * depth / rate * (1 + constants.waves / waves)


def _products(
    kind: LayerProfile, tokens: float, setup: TrainingSetup, gpu: Gpu, constants: Constants
) -> tuple[float, float, float]:
    """Return the seconds of a layer's products: forward, for the inputs' gradients, and for the weights'."""
    seconds = [0.0, 0.0, 0.0]
    tensor = setup.layout.tensor
    for inputs, outputs in kind.linears:
        # A matrix that widens is split by its outputs, one that narrows to the model's width by its inputs.
        shape = (inputs, outputs / tensor) if outputs > inputs else (inputs / tensor, outputs)
        for index, (rows, columns, depth) in enumerate(
            ((tokens, shape[1], shape[0]), (tokens, shape[0], shape[1]), (shape[1], shape[0], tokens))
        ):
            seconds[index] += _product(rows, columns, depth, gpu, constants)
    # Fused experts are not linear layers, neither to adapters nor to torch.
    in_linears = sum(map(prod, kind.linears))
    rest = max(0.0, kind.active_weights - in_linears)
    others = 2 * tokens * rest / tensor / (gpu.bf16_tflops * 1e12 * constants.matmul)
    share = min(1.0, kind.active_weights / in_linears) if in_linears else 0.0
    forward, to_input, to_weights = (share * each + others for each in seconds)
    return forward, to_input, to_weights


def _attention(kind: LayerProfile, tokens: float, setup: TrainingSetup, gpu: Gpu, constants: Constants) -> float:
    """Return the seconds of attention in the forward pass: scores and values."""
    eager = setup.attention == "eager"
    keys = setup.sequence_length if eager else attended_tokens(kind, setup.sequence_length)
    flops = 4 * kind.attention_width / setup.layout.tensor * tokens * keys
    share = constants.matmul if eager else constants.attention
    return flops / (gpu.bf16_tflops * 1e12 * share)


def _moved_bytes(
    kind: LayerProfile, profile: ModelProfile, tokens: float, setup: TrainingSetup, constants: Constants
) -> float:
    """Return the bytes that element-wise operations move in the forward pass."""
    tensor, hidden = setup.layout.tensor, profile.hidden_size
    # One side of each matrix has the model's width; the widths of the other sides are what the layer computes.
    moved = 2 * tokens * constants.passes * (kind.active_weights / hidden / tensor + RESIDUAL * hidden)
    if setup.attention == "eager" and kind.attention_width:
        moved += tokens * setup.sequence_length * profile.attention_heads / tensor * constants.scores
    if setup.lora:
        # Reads the input, with dropout two more times; adds to the output, which is read twice and written.
        read = 3 if setup.lora.dropout else 1
        moved += 2 * tokens * sum(read * inputs + 3 * outputs for inputs, outputs in kind.linears) / tensor
    if setup.quantized:
        moved += 4.5 * sum(map(prod, kind.linears))  # half a byte read, two written and two read again
    return moved
