"""Host time: the seconds in which Python launches the kernels of a layer, which show where the GPU is faster."""

from ...model_profile.profile import LayerProfile, training_mode
from ..constants import Constants
from ..training_setup import TrainingSetup

KERNELS = 100
"""Of a Llama layer's forward pass in transformers 5.22.2, products and memory operations included."""
ADAPTER, FUSED_ADAPTER = 6, 3
"""Per adapted matrix: dropout, two products, the scale, the sum, and a cast; fused (`lora.fused`), the first three."""
DEQUANTIZE = 3
"""Per 4-bit matrix: its blocks' scales, their offset, and the weights."""
EXPERT = 14
"""Per expert that is computed by itself: its tokens are found and gathered, three products, the activation function,
the weighting and the sum into the result."""
FUSED = 0.5
"""Share of a layer's kernels that remains when element-wise operations are fused: 7 products, attention, and one for
each norm, the rotary embedding, the activation function and the sums, with their copies."""

ONE_BY_ONE = 2
"""Products per expert and pass where torch groups them in one call and then computes one after the other: on GPUs
without a kernel for it, after it has waited for the counts of their tokens (torch 2.13, `_grouped_mm_fallback`)."""

NODE = 8
"""Ranks of a node, the most that a rank's hooks wait for: over more of them nothing was measured."""
BACKWARD_LAUNCHES, BACKWARD_HOOKS = 2.0, 0.7
"""A layer's backward pass by its forward pass: launches as its operations; ZeRO-3's hooks measured, 2.2 and 3.1 ms more
per layer than under ZeRO-1 (deepspeed 0.19.8, a Llama of 16 layers 64 wide, two CPU ranks, time of the process)."""
GRADIENT_HOOK = 3e-5
"""Seconds in which ZeRO takes a trained weight's gradient in a backward pass, at stage 1 in the last of a step only
(deepspeed 0.19.8, Llamas of 8 and 24 layers 64 wide, one CPU rank, beside plain torch: 20 to 45 us with all weights
trained, or adapters)."""


def kernels(kind: LayerProfile, setup: TrainingSetup, experts: float) -> float:
    """Return how many kernels a layer's forward pass launches on one rank, of its `experts` there."""
    count = KERNELS * (FUSED if setup.fuses else 1.0)
    per_matrix = (FUSED_ADAPTER if setup.lora.fused else ADAPTER) if setup.lora else 0
    quantized = len(kind.linears) * DEQUANTIZE if setup.quantized else 0
    return (
        count
        + per_matrix * adapted_matrices(kind, setup)
        + quantized
        + (0 if setup.grouped_experts else EXPERT * experts)
    )


def hooked_modules(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return the modules of a layer whose weights ZeRO-3 fetches and releases: its own, and two for each adapter."""
    return kind.modules + 2 * adapted_matrices(kind, setup)


def trained_weights(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return how many weights of a layer are trained: those of its modules, or two for each adapted matrix."""
    return 2 * adapted_matrices(kind, setup) if setup.lora else kind.modules


def adapted_matrices(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return how many linear layers of a layer have adapters."""
    return len(kind.linears) * adapted_share(kind, setup) if setup.lora else 0.0


def adapted_share(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return the share of a layer's linear layers, by their widths, that have adapters."""
    per_rank = kind.adapter_parameters.get(f"{training_mode(setup.lora)} rank")
    widths = sum(map(sum, kind.linears))
    return 1.0 if per_rank is None or not widths else min(1.0, per_rank / widths)


def groups_experts(setup: TrainingSetup, constants: Constants) -> bool:
    """Return whether a GPU computes all experts of a layer in one kernel.

    torch has one for compute capability 9 and 10 in bf16, the same GPUs for which it takes cuDNN's attention.
    """
    return setup.grouped_experts and setup.precision == "bf16" and "cudnn" in constants.kernels


def waiting_seconds(experts: float, products: float, setup: TrainingSetup, constants: Constants) -> float:
    """Return the seconds of a pass in which the GPU waits for the next expert's product to be launched.

    Args:
        experts: of the layer, on one rank.
        products: seconds of their products in the pass.
        setup: its experts, grouped or not.
        constants: seconds per kernel.
    """
    if not setup.grouped_experts or groups_experts(setup, constants):
        return 0.0
    return max(0.0, ONE_BY_ONE * experts * constants.launch - products)


def host_seconds(
    kind: LayerProfile, setup: TrainingSetup, constants: Constants, experts: float = 0.0
) -> tuple[float, float]:
    """Return the host's seconds for a layer's forward pass, and for its backward pass.

    Args:
        kind: the layer.
        setup: adapters, 4-bit weights, ungrouped experts and ZeRO-3 add to them.
        constants: seconds per kernel and per module that ZeRO-3 fetches.
        experts: of the layer, on one rank.
    """
    others = min(NODE, setup.zero_ranks) - 1
    hook = constants.hook * (1 + constants.waiting * others) if setup.zero_stage == 3 else 0.0
    hooks = hooked_modules(kind, setup) * hook
    launches = kernels(kind, setup, experts) * constants.launch
    taken = 0.0 if setup.fsdp or not setup.zero_stage else GRADIENT_HOOK * trained_weights(kind, setup)
    if setup.zero_stage == 1:
        taken /= setup.gradient_accumulation_steps
    return launches + hooks, BACKWARD_LAUNCHES * launches + BACKWARD_HOOKS * hooks + taken
