"""Host time: the seconds in which Python launches the kernels of a layer, which matter if the GPU is faster."""

from ...model_profile.profile import LayerProfile, training_mode
from ..constants import Constants
from ..training_setup import TrainingSetup

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


def groups_experts(setup: TrainingSetup, constants: Constants) -> bool:
    """Return whether a GPU computes all experts of a layer in one kernel.

    torch has such a kernel for compute capability 9 and 10 in bf16, the GPUs on which it also uses cuDNN's attention.
    """
    return setup.software.grouped_experts and setup.precision == "bf16" and "cudnn" in constants.kernels


def waiting_seconds(experts: float, products: float, setup: TrainingSetup, constants: Constants) -> float:
    """Return the seconds of a pass in which the GPU waits for the next expert's product to be launched.

    Args:
        experts: number of the layer's experts on one rank.
        products: seconds of their products in the pass.
        setup: the training setup, with grouped experts or not.
        constants: the seconds per kernel.
    """
    if not setup.software.grouped_experts or groups_experts(setup, constants):
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
    taken = 0.0 if setup.software.fsdp or not setup.zero_stage else GRADIENT_HOOK * trained_weights(kind, setup)
    if setup.zero_stage == 1:
        taken /= setup.gradient_accumulation_steps
    return launches + hooks, BACKWARD_LAUNCHES * launches + BACKWARD_HOOKS * hooks + taken
