"""Weights on a GPU: as loaded, and as ZeRO-3 gathers them."""

from ...model_profile.profile import ModelProfile
from ..training_setup import TrainingSetup
from .stage_shards import StageShard
from .states import WIDTH

NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in 4 bits, with an 8-bit scale per 64 weights and an fp32 number per 256 scales
(arXiv:2305.14314)."""


def loaded_bytes(shard: StageShard, setup: TrainingSetup) -> float:
    """Return the bytes of a stage's loaded weights, with quantised ones in 4 bits."""
    experts = shard.expert_parameters if setup.software.quantized_experts else 0
    quantized = shard.linear_parameters + experts if setup.quantized else 0
    width = WIDTH["fp32" if setup.software.frozen_fp32 else setup.precision]
    return width * (shard.parameters - quantized) + NF4 * quantized


def teacher_bytes(setup: TrainingSetup) -> float:
    """Return the bytes of a teacher's weights on one rank. ZeRO-3 shards them, unless they are in 4 bits."""
    if setup.teacher_quantized:
        return NF4 * setup.teacher_parameters
    return WIDTH[setup.precision] * setup.teacher_parameters / (setup.zero_ranks if setup.zero_stage == 3 else 1)


def tower_bytes(profile: ModelProfile, setup: TrainingSetup) -> float:
    """Return the bytes of a frozen vision tower's weights on one rank; they are never quantised.

    The tower's activations for a batch's images are not counted, because they are freed before the layers begin. Its
    outputs are tokens of the sequence and are counted there.
    """
    return WIDTH[setup.precision] * profile.tower_parameters / (setup.zero_ranks if setup.zero_stage == 3 else 1)


def loading(shard: StageShard, setup: TrainingSetup) -> dict[str, float]:
    """Return the bytes on a GPU while weights are loaded. ZeRO-3 shards them one by one, except 4-bit weights."""
    weights = loaded_bytes(shard, setup)
    if setup.quantized and not setup.software.fsdp:
        # Each matrix is copied unquantised, and packed on the GPU.
        largest = max(inputs * outputs for kind, _ in shard.layer_counts for inputs, outputs in kind.linears)
        return {"parameters": weights, "live_parameters": WIDTH[setup.precision] * largest}
    if setup.zero_stage < 3:
        # Experts are distributed on the host, before the model moves to the GPU (deepspeed, engine.py, __init__).
        elsewhere = shard.expert_parameters * (1 - 1 / setup.layout.expert)
        return {"parameters": weights - WIDTH[setup.precision] * elsewhere}
    # zero.Init creates offloaded shards directly on the host (deepspeed, partition_parameters.py, remote_device).
    held = 0.0 if setup.offload_parameters != "none" else weights / setup.zero_ranks
    return {"parameters": held, "live_parameters": WIDTH[setup.precision] * shard.largest_module}


def gathered(shard: StageShard, setup: TrainingSetup) -> float:
    """Return the bytes of weights that exist whole at one moment in the middle of the model.

    Under ZeRO-3 these are a layer, prefetched weights, and adapters too small to be sharded. A 4-bit matrix is
    dequantised as a whole, once for the forward and once for the backward pass.
    """
    width = WIDTH[setup.precision]
    largest = max(inputs * outputs for kind, _ in shard.layer_counts for inputs, outputs in kind.linears)
    dequantized = 2 * width * largest if setup.quantized else 0.0
    if setup.lora and setup.lora.dora:
        # The norm of a weight: a unit matrix, the adapters' product, its multiple and the sum (peft, lora/dora.py).
        sizes = (inputs * (inputs + 3 * outputs) for kind, _ in shard.layer_counts for inputs, outputs in kind.linears)
        dequantized += width * max(sizes)
    if not setup.gathers:
        return dequantized
    hidden = shard.hidden_size
    block = max(kind.parameters for kind, _ in shard.layer_counts)
    prefetched = setup.prefetched(hidden, block)
    threshold = 10 * hidden if setup.persistence_threshold is None else setup.persistence_threshold
    persistent = shard.adapter_parameters if setup.lora and setup.lora.rank * hidden <= threshold else 0
    return dequantized + width * (min(max(shard.largest_module, block) + prefetched, shard.parameters) + persistent)


def gathered_between_passes(shard: StageShard, setup: TrainingSetup) -> float:
    """Return the bytes of weights that exist whole between the forward and the backward pass."""
    one = gathered(shard, setup)
    if not setup.gathers:
        return one
    kept = min(WIDTH[setup.precision] * setup.kept_weights, loaded_bytes(shard, setup))
    return max(one + held_by_autograd(shard.expert_parameters, setup), kept)


def held_by_autograd(experts: float, setup: TrainingSetup) -> float:
    """Return the bytes of gathered expert weights that ZeRO-3 cannot free between the forward and the backward pass.

    Experts multiply by slices of their weights. Autograd saves the slices, each of which keeps the whole gathered
    weight alive, and the backward pass gathers it a second time. Recomputed layers save nothing. Observed with
    DeepSpeed 0.19.8 in tests/workers/held_experts.py; `LinearFunctionForZeroStage3` prevents it for dense layers.
    """
    if not setup.gathers or setup.gradient_checkpointing or setup.software.quantized_experts:
        return 0.0
    return WIDTH[setup.precision] * experts / setup.layout.expert


def gathered_for_answers(shard: StageShard, setup: TrainingSetup) -> float:
    """Return the bytes of whole weights beyond a rank's shards, if ZeRO-3 gathers them to generate answers."""
    if setup.zero_stage < 3 or not setup.rollout_gathers:
        return 0.0
    return WIDTH[setup.precision] * shard.parameters * (1 - 1 / setup.zero_ranks)
