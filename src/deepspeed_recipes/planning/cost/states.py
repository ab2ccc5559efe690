"""Model states on each rank, in bytes: weights, as divided, loaded and gathered, gradients and optimizer states."""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

from ...recipe.layout import Layout, balanced
from ...recipe.recipe import Lora
from ..model_profile.profile import LayerProfile, ModelProfile
from . import activations
from .constants import COUNTS
from .training_setup import TrainingSetup

WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a weight and of its gradient."""

Moment = Literal["forward", "backward", "step"]
"""The end of a step's last forward pass, the end of its backward pass, and the peak of the optimizer step."""


@dataclass(frozen=True)
class States:
    """Bytes on one rank. Buffers, gathered weights and activations are not counted."""

    parameters: float
    gradients: float
    """During the optimizer step, including the copies that it makes."""
    optimizer: float
    """The optimizer's moments, and the fp32 weights that it updates."""
    host: float
    """All states in host memory; 0 without offloading."""


def state_bytes(
    trained: float,
    setup: TrainingSetup,
    moment: Moment = "backward",
    ranks: int | None = None,
    matrices: float = 1.0,
) -> States:
    """Return the states on one rank of `trained` parameters, with DeepSpeed 0.19.8.

    ZeRO shards them over `ranks`, all that hold the same weights unless given. The share `matrices` of them is in
    matrices, which Muon trains; AdamW trains the others.
    """
    stage, width, ranks = setup.zero_stage, WIDTH[setup.precision], ranks or setup.zero_ranks
    wide = setup.fp32_accumulation and width == 2
    held = width * trained / (ranks if stage == 3 else 1)
    # Muon's momentum is in fp32 without ZeRO, in the gradients' type with it (stage3.py, `_create_momentum_buffer`); at
    # stages 1 and 2 there is also a copy that is being updated (stage_1_and_2.py, `_muon_staging_momentum`).
    of_muon = 4.0 if stage == 0 else (1.0 if stage == 3 else 2.0) * width
    moments = {
        "adamw": COUNTS.adam_moments,
        "adamw_8bit": COUNTS.eight_bit_moments,
        "muon": matrices * of_muon + (1 - matrices) * COUNTS.adam_moments,
    }[setup.optimizer]
    # Without ZeRO, Adam updates fp32 weights in place; all other optimizers hold an fp32 copy of what they update.
    unit = 6 if setup.bf16_states else moments if stage == 0 and setup.precision == "fp32" else 4 + moments
    own = trained / (ranks if stage else 1)
    kept = unit * own
    if setup.offload_optimizer != "none":
        # In addition to Adam's fp32 gradients: those from the GPU, and at stage 2 the sum of earlier micro-batches.
        copies = 2 if stage == 2 and setup.gradient_accumulation_steps > 1 else 1
        return States(held, 0, 0, kept + (4 + copies * width) * trained / ranks)
    accumulated = (4 if wide else width) * (trained if stage < 2 else own)
    reduced = width * trained if stage == 1 and wide else 0  # the gradients that were added to the fp32 sum
    allocated = accumulated if stage == 3 or (stage == 1 and wide) else 0.0
    gradients = {"backward": accumulated + reduced}
    gradients["forward"] = gradients["backward"] if setup.gradient_accumulation_steps > 1 else allocated
    # Adam needs gradients in the type of its weights: others are flattened, then converted into a copy.
    converted = 0 if wide or setup.bf16_states or width == 4 else 4
    if stage == 0:
        gradients["step"] = accumulated + converted * trained
    elif stage == 3:
        update = ((4 if wide else width) + converted) * min(own, setup.sub_group_size)
        gradients["step"] = accumulated + max(update, COUNTS.overflow_check * own if setup.precision == "fp16" else 0)
    else:
        gradients["step"] = gradients["backward"] if wide else (2 * width + converted) * own
    if setup.software.foreach_adam and stage < 3:  # at stage 3 the fitted fragmentation, from such rows, includes it
        gradients["step"] += (2 if setup.bf16_states else 4) * own  # the square roots of all second moments
    return States(held, gradients[moment], kept, 0)


@dataclass(frozen=True)
class StageShard:
    """The layers and parameters on one rank of a pipeline stage, before ZeRO shards them."""

    hidden_size: int
    layer_counts: tuple[tuple[LayerProfile, int], ...]
    """The kinds of layers, each with its number of layers, in the order of their first layers."""
    parameters: float
    """All parameters, those of all experts included. Tensor-parallel ranks hold their share of each split matrix."""
    expert_parameters: float
    linear_parameters: float
    """Those in linear layers, which quantisation applies to."""
    adapter_parameters: float
    largest_module: float
    """Parameters of the module with the most parameters of its own."""
    micro_batches_in_flight: int
    """Micro-batches whose activations wait for the backward pass: with 1F1B, as many as stages from here on."""
    is_last: bool

    def trained(self, setup: TrainingSetup) -> float:
        """Return the number of trained parameters: the adapters', all, or some."""
        return self.adapter_parameters if setup.lora else setup.trained_share * self.parameters


def stage_shards(profile: ModelProfile, setup: TrainingSetup, layout: Layout | None = None) -> tuple[StageShard, ...]:
    """Return the shard of each pipeline stage, balanced by parameters; `layout` replaces the setup's.

    Stages with equal layers share one, the first's, which has the most micro-batches in flight.
    """
    layout = layout or setup.layout
    waiting = min(layout.pipeline, setup.gradient_accumulation_steps)
    return _stage_shards(profile, layout.pipeline, layout.tensor, waiting, setup.lora, setup.saved_parameters)


@lru_cache(maxsize=4096)  # a search needs the same few thousands of times
def _stage_shards(
    profile: ModelProfile, stages: int, tensor: int, waiting: int, lora: Lora | None, saved: int
) -> tuple[StageShard, ...]:
    output_matrix = profile.vocab_size * profile.hidden_size
    found: dict[object, StageShard] = {}
    keys = []
    head = _head_of_a_stage(profile) if stages > 1 else profile.head_parameters  # 0 if it is tied
    for index, span in enumerate(stage_ranges(profile, stages)):
        is_last, order = index == stages - 1, Counter(profile.layer_order[span.start : span.stop])
        keys.append((*order.items(), index == 0, is_last))
        if keys[-1] in found:
            continue
        counts = tuple((profile.layer_kinds[kind], count) for kind, count in order.items())
        own = sum(count * (kind.parameters - kind.tensor_split * (1 - 1 / tensor)) for kind, count in counts)
        adapters = sum(count * activations.of_mode(kind.adapter_parameters, lora) for kind, count in counts if lora)
        ends = (0 if index else profile.embedding_parameters) + (head if is_last else 0)
        found[keys[-1]] = StageShard(
            hidden_size=profile.hidden_size,
            layer_counts=counts,
            parameters=own + ends,
            expert_parameters=sum(count * kind.expert_parameters for kind, count in counts),
            linear_parameters=sum(count * sum(map(prod, kind.linears)) for kind, count in counts),
            adapter_parameters=adapters + saved,
            largest_module=max(
                *(kind.largest_module for kind, _ in counts), output_matrix if is_last or not index else 0
            ),
            micro_batches_in_flight=min(stages - index, waiting),
            is_last=is_last,
        )
    return tuple(found[key] for key in keys)


@lru_cache(maxsize=4096)
def stage_ranges(profile: ModelProfile, count: int) -> tuple[range, ...]:
    """Return the layers of each pipeline stage, balanced by parameters as in training (`recipe.layout.balanced`).

    The embedding counts as part of the first layer, the norm and the output matrix as part of the last.
    """
    costs = [layer.parameters for layer in profile.layers]
    costs[0] += profile.embedding_parameters
    costs[-1] += _head_of_a_stage(profile)
    return tuple(balanced(costs, count))


def _head_of_a_stage(profile: ModelProfile) -> int:
    """Return the parameters after the layers on a separate last stage, which has a copy of a tied output matrix."""
    return profile.head_parameters + (profile.vocab_size * profile.hidden_size if profile.tied_embeddings else 0)


NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in 4 bits, with an 8-bit scale per 64 weights and an fp32 number per 256 scales
(arXiv:2305.14314)."""


def loaded_bytes(shard: StageShard, setup: TrainingSetup) -> float:
    """Return the bytes of a stage's loaded weights, with quantised ones in 4 bits."""
    experts = shard.expert_parameters if not setup.software.grouped_experts else 0
    quantized = shard.linear_parameters + experts if setup.quantized else 0
    width = WIDTH["fp32" if setup.software.frozen_fp32 else setup.precision]
    return width * (shard.parameters - quantized) + NF4 * quantized


def loading_bytes(shard: StageShard, setup: TrainingSetup) -> dict[str, float]:
    """Return the bytes on a GPU while weights are loaded. ZeRO-3 shards them one by one, except 4-bit weights."""
    weights, width = loaded_bytes(shard, setup), WIDTH[setup.precision]
    if setup.quantized:
        # Each matrix is copied unquantised, and packed on the GPU.
        return {"parameters": weights, "live_parameters": width * _largest_matrix(shard)}
    if setup.zero_stage < 3:
        # Experts are distributed on the host, before the model moves to the GPU (deepspeed, engine.py, __init__).
        return {"parameters": weights - width * shard.expert_parameters * (1 - 1 / setup.layout.expert)}
    # zero.Init creates offloaded shards directly on the host (deepspeed, partition_parameters.py, remote_device).
    held = 0.0 if setup.offload_parameters != "none" else weights / setup.zero_ranks
    return {"parameters": held, "live_parameters": width * shard.largest_module}


def _largest_matrix(shard: StageShard) -> int:
    return max(inputs * outputs for kind, _ in shard.layer_counts for inputs, outputs in kind.linears)


def gathered_bytes(shard: StageShard, setup: TrainingSetup) -> float:
    """Return the bytes of weights that exist whole at one moment in the middle of the model.

    Under ZeRO-3 these are a layer, prefetched weights, and adapters too small to be sharded. A 4-bit matrix is
    dequantised as a whole, once for the forward and once for the backward pass.
    """
    width, hidden = WIDTH[setup.precision], shard.hidden_size
    dequantized = 2 * width * _largest_matrix(shard) if setup.quantized else 0.0
    if setup.lora and setup.lora.dora:
        # The norm of a weight: a unit matrix, the adapters' product, its multiple and the sum (peft, lora/dora.py).
        sizes = (inputs * (inputs + 3 * outputs) for kind, _ in shard.layer_counts for inputs, outputs in kind.linears)
        dequantized += width * max(sizes)
    if not setup.gathers:
        return dequantized
    block = max(kind.parameters for kind, _ in shard.layer_counts)
    threshold = 10 * hidden if setup.persistence_threshold is None else setup.persistence_threshold
    persistent = shard.adapter_parameters if setup.lora and setup.lora.rank * hidden <= threshold else 0
    whole = max(shard.largest_module, block) + setup.prefetched(hidden, block)
    return dequantized + width * (min(whole, shard.parameters) + persistent)


def held_by_autograd(experts: float, setup: TrainingSetup) -> float:
    """Return the bytes of gathered expert weights that ZeRO-3 cannot free between the forward and the backward pass.

    Experts multiply by slices of their weights, which autograd saves unless layers are recomputed: each slice keeps the
    gathered weight alive, and the backward pass gathers it once more (deepspeed 0.19.8, tests/workers/held_experts.py);
    `LinearFunctionForZeroStage3` prevents it for dense layers.
    """
    if not setup.gathers or setup.gradient_checkpointing or not setup.software.grouped_experts:
        return 0.0
    return WIDTH[setup.precision] * experts / setup.layout.expert


def held_bytes(shard: StageShard, setup: TrainingSetup, moment: Moment) -> dict[str, float]:
    """Return the bytes of model states on a GPU; all states of adapters are one component."""
    found, on_gpu = of_stage(shard, setup, moment), setup.offload_parameters == "none"
    share = 1 if setup.lora else 1 - setup.trained_share + setup.reference  # of the weights that are frozen, or a copy
    frozen = share * loaded_bytes(shard, setup) / (setup.zero_ranks if setup.zero_stage == 3 else 1)
    second = WIDTH[setup.precision] * shard.parameters / setup.partition_size if setup.partition_size > 1 else 0.0
    if setup.lora:
        adapters = found.gradients + found.optimizer + (found.parameters if on_gpu else 0)
        return {"parameters": (frozen if on_gpu else 0) + second, "adapters": adapters}
    parameters = (found.parameters + frozen if on_gpu else 0) + second
    return {"parameters": parameters, "gradients": found.gradients, "optimizer": found.optimizer}


def of_stage(shard: StageShard, setup: TrainingSetup, moment: Moment) -> States:
    """Return the states of the trained parameters on one rank of a pipeline stage, including those on the host."""
    if setup.layout.expert == 1 or setup.lora:
        return state_bytes(shard.trained(setup), setup, moment, matrices=shard.linear_parameters / shard.parameters)
    # Every rank has the dense weights, and a part of the experts, which the ranks with the same part shard.
    dense, experts = shard.parameters - shard.expert_parameters, shard.expert_parameters / setup.layout.expert
    copies = max(1, setup.zero_ranks // setup.layout.expert)
    both = state_bytes(dense, setup, moment), state_bytes(experts, setup, moment, copies)
    return States(*map(sum, zip(*(vars(one).values() for one in both), strict=True)))
