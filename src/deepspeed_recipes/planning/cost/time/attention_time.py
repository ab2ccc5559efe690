"""Attention time: the kernel that a run uses on its GPU, and the duration of its forward and backward pass.

A kernel's share of the peak grows with the sequence length, since blocks on the diagonal are computed as a whole and
short sequences leave multiprocessors idle. The shares in `constants.json` are for long sequences with causal masks.
"""

from collections.abc import Container
from typing import Literal

from ...hardware.gpus import Gpu
from ...model_profile.profile import LayerProfile
from ..constants import Constants
from ..training_setup import TrainingSetup

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
    kind: LayerProfile, tokens: float, setup: TrainingSetup, gpu: Gpu, constants: Constants
) -> tuple[float, float]:
    """Return the seconds of a layer's attention (scores and values), for the forward and the backward pass.

    Args:
        kind: the layer.
        tokens: number of tokens of a micro-batch on one rank.
        setup: the training setup, with the implementation and the sequence length.
        gpu: the GPU, whose peak the shares refer to.
        constants: the shares.
    """
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
