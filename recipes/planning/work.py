"""The arithmetic of a layer and the bytes it moves, on one rank, and the seconds they take there."""

from dataclasses import dataclass
from math import prod

from recipes.planning.anatomy import Anatomy, Kind
from recipes.planning.constants import Constants
from recipes.planning.hardware import Gpu
from recipes.planning.setup import Setup

TILE = 128 * 256
"""Numbers of a matrix product's result that one streaming multiprocessor works on at a time: cuBLAS's largest tile."""
RESIDUAL = 10
"""Vectors as wide as the model that a layer's norms and residual sums read and write: two of each, 2 and 3 vectors."""
LOSS = 30
"""Bytes moved per logit: 2 written, and 12 + 12 for the fp32 copy and its softmax, both ways, and 4 read back."""


@dataclass(frozen=True)
class Seconds:
    """Of one micro-batch on one rank, forward and backward pass."""

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    """Bound by the memory: norms, activations, residual sums, adapters, 4-bit weights."""
    recomputation: float = 0.0
    logits: float = 0.0
    launch: float = 0.0
    """In which the GPU waits for its next kernel."""

    @property
    def total(self) -> float:
        """One after the other."""
        return self.matmul + self.attention + self.elementwise + self.recomputation + self.logits + self.launch

    def __add__(self, other: "Seconds") -> "Seconds":
        """Return both, one after the other."""
        return Seconds(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def __mul__(self, times: int) -> "Seconds":
        """Return so many of it."""
        return Seconds(*(getattr(self, name) * times for name in self.__dataclass_fields__))


def attended(kind: Kind, length: int) -> float:
    """Return how many tokens a token attends to on average, causally: half of its row, or its window."""
    if kind.window is None or kind.window >= length:
        return length / 2
    return kind.window * (1 - kind.window / (2 * length))


def model_flops(anatomy: Anatomy, setup: Setup) -> float:
    """Return the operations of a step over the whole world, as `training.flops` counts them for MFU.

    Two per weight forward, two for the gradient of the input and two for that of a trained weight; recomputation is no
    progress and not counted, and neither are windows.
    """
    per_weight = 6 if setup.lora is None else 4
    weights = sum(layer.multiplied for layer in anatomy.layers) + anatomy.hidden * anatomy.vocabulary
    adapters = sum(adapter_parameters(layer, setup) for layer in anatomy.layers)
    attention = 6 * sum(layer.attention_width for layer in anatomy.layers) * setup.sequence_length
    return (per_weight * weights + 6 * adapters + attention) * setup.tokens_per_step


def adapter_parameters(kind: Kind, setup: Setup) -> int:
    """Return what is trained of a layer with adapters on all of its linear layers; 0 without adapters."""
    return setup.lora.rank * sum(sum(shape) for shape in kind.linears) if setup.lora else 0


def layer(kind: Kind, anatomy: Anatomy, setup: Setup, gpu: Gpu, constants: Constants) -> Seconds:
    """Return the seconds of a decoder layer."""
    tokens = setup.micro_batch_size * setup.sequence_length / setup.layout.sequence
    forward, to_input, to_weights = _products(kind, tokens, setup, gpu, constants)
    matmul = forward + to_input + (0 if setup.lora else to_weights)
    attention = _attention(kind, tokens, setup, gpu, constants)
    moved = _moved(kind, anatomy, tokens, setup, constants) / (gpu.memory_gbs * 1e9 * constants.memory)
    once = forward + attention + moved
    # Fused attention computes the scores again in its backward pass: five products instead of four.
    again = (4 if setup.attention == "eager" else 5) / 2
    work = matmul + (1 + again) * attention + 3 * moved + setup.gradient_checkpointing * once
    passes = 3 + setup.gradient_checkpointing
    return Seconds(
        matmul=matmul,
        attention=(1 + again) * attention,
        elementwise=3 * moved,
        recomputation=setup.gradient_checkpointing * once,
        launch=passes * constants.gap + max(0.0, passes * constants.launch - work),
    )


def head(anatomy: Anatomy, setup: Setup, gpu: Gpu, constants: Constants) -> Seconds:
    """Return the seconds of the output matrix and of the loss."""
    tokens = setup.micro_batch_size * setup.sequence_length / setup.layout.sequence
    wide = anatomy.vocabulary / setup.layout.tensor
    passes = (2 if setup.lora else 3) + setup.tiles(anatomy.vocabulary)
    products = passes * _product(tokens, wide, anatomy.hidden, gpu, constants)
    return Seconds(logits=products + LOSS * tokens * wide / (gpu.memory_gbs * 1e9 * constants.memory))


def _product(rows: float, columns: float, depth: float, gpu: Gpu, constants: Constants) -> float:
    """Return the seconds of a matrix product."""
    rate = gpu.bf16_tflops * 1e12 * constants.matmul
    if any(size % 64 for size in (columns, depth)):
        rate *= constants.unaligned
    waves = rows * columns / (TILE * gpu.units)
    return 2 * rows * columns * depth / rate * (1 + constants.waves / waves)


def _products(kind: Kind, tokens: float, setup: Setup, gpu: Gpu, constants: Constants) -> tuple[float, float, float]:
    """Return the seconds of a layer's products: forward, for the inputs' gradients, and for the weights'."""
    seconds = [0.0, 0.0, 0.0]
    tensor = setup.layout.tensor
    for inputs, outputs in kind.linears:
        # The way in is split by its outputs, the way back to the model's width by its inputs.
        shape = (inputs, outputs / tensor) if outputs > inputs else (inputs / tensor, outputs)
        for index, (rows, columns, depth) in enumerate(
            ((tokens, shape[1], shape[0]), (tokens, shape[0], shape[1]), (shape[1], shape[0], tokens))
        ):
            seconds[index] += _product(rows, columns, depth, gpu, constants)
    # Experts are no linear layers to adapters, nor are fused ones to torch.
    known = sum(map(prod, kind.linears))
    rest = max(0.0, kind.multiplied - known)
    others = 2 * tokens * rest / tensor / (gpu.bf16_tflops * 1e12 * constants.matmul)
    share = min(1.0, kind.multiplied / known) if known else 0.0
    forward, to_input, to_weights = (share * each + others for each in seconds)
    return forward, to_input, to_weights


def _attention(kind: Kind, tokens: float, setup: Setup, gpu: Gpu, constants: Constants) -> float:
    """Return the seconds of attention forward: scores and values."""
    eager = setup.attention == "eager"
    keys = setup.sequence_length if eager else attended(kind, setup.sequence_length)
    flops = 4 * kind.attention_width / setup.layout.tensor * tokens * keys
    share = constants.matmul if eager else constants.attention
    return flops / (gpu.bf16_tflops * 1e12 * share)


def _moved(kind: Kind, anatomy: Anatomy, tokens: float, setup: Setup, constants: Constants) -> float:
    """Return the bytes that element-wise work moves forward."""
    tensor = setup.layout.tensor
    # A matrix has the model's width on one side; what is on the others' is what the layer computes.
    moved = 2 * tokens * constants.passes * (kind.multiplied / anatomy.hidden / tensor + RESIDUAL * anatomy.hidden)
    if setup.attention == "eager" and kind.attention_width:
        moved += tokens * setup.sequence_length * anatomy.heads / tensor * constants.scores
    if setup.lora:
        # Reads the input, with dropout another two times; adds to the output, which is read twice and written.
        read = 3 if setup.lora.dropout else 1
        moved += 2 * tokens * sum(read * inputs + 3 * outputs for inputs, outputs in kind.linears) / tensor
    if setup.quantized:
        moved += 4.5 * sum(map(prod, kind.linears))  # half a byte read, two written and two read again
    return moved
