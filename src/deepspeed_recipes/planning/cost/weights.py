"""Weights on a GPU of each pipeline stage: as divided, as loaded, and as ZeRO-3 gathers them."""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from ...recipe.layout import Layout, balanced
from ...recipe.recipe import Lora
from ..model_profile.profile import LayerProfile, ModelProfile
from . import activations
from .states import WIDTH
from .training_setup import TrainingSetup


@dataclass(frozen=True)
class StageShard:
    """The layers and parameters on one rank of a pipeline stage, before ZeRO shards them."""

    hidden_size: int
    layers: tuple[LayerProfile, ...]
    layer_counts: tuple[tuple[LayerProfile, int], ...]
    """The kinds of layers, each with its number of layers."""
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
    """Return the shard of each pipeline stage, balanced by parameters; `layout` replaces the setup's."""
    layout = layout or setup.layout
    waiting = min(layout.pipeline, setup.gradient_accumulation_steps)
    return _stage_shards(profile, layout.pipeline, layout.tensor, waiting, setup.lora, setup.saved_parameters)


@lru_cache(maxsize=4096)  # a search asks for the same few, thousands of times
def _stage_shards(
    profile: ModelProfile, stages: int, tensor: int, waiting: int, lora: Lora | None, saved: int
) -> tuple[StageShard, ...]:
    output_matrix, found = profile.vocab_size * profile.hidden_size, []
    head = _head_of_a_stage(profile) if stages > 1 else profile.head_parameters  # 0 if it is tied
    for index, span in enumerate(stage_ranges(profile, stages)):
        is_last, order = index == stages - 1, profile.layer_order[span.start : span.stop]
        counts = tuple((profile.layer_kinds[kind], count) for kind, count in Counter(order).items())
        own = sum(count * (kind.parameters - kind.tensor_split * (1 - 1 / tensor)) for kind, count in counts)
        adapters = sum(count * activations.of_mode(kind.adapter_parameters, lora) for kind, count in counts if lora)
        ends = (0 if index else profile.embedding_parameters) + (head if is_last else 0)
        found.append(
            StageShard(
                hidden_size=profile.hidden_size,
                layers=tuple(profile.layer_kinds[kind] for kind in order),
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
        )
    return tuple(found)


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


def teacher_bytes(setup: TrainingSetup) -> float:
    """Return the bytes of a teacher's weights on one rank; in 4 bits they are whole on each."""
    return NF4 * setup.teacher_parameters if setup.teacher_quantized else _frozen(setup.teacher_parameters, setup)


def tower_bytes(profile: ModelProfile, setup: TrainingSetup) -> float:
    """Return the bytes of a frozen vision tower's weights on one rank; they are never quantised.

    Its activations for a batch's images are not counted: they are freed before the layers begin. Its outputs count as
    tokens of the sequence.
    """
    return _frozen(profile.tower_parameters, setup)


def _frozen(parameters: int, setup: TrainingSetup) -> float:
    """Return the bytes on one rank of weights that only ZeRO-3 shards."""
    return WIDTH[setup.precision] * parameters / (setup.zero_ranks if setup.zero_stage == 3 else 1)


def loading(shard: StageShard, setup: TrainingSetup) -> dict[str, float]:
    """Return the bytes on a GPU while weights are loaded. ZeRO-3 shards them one by one, except 4-bit weights."""
    weights, width = loaded_bytes(shard, setup), WIDTH[setup.precision]
    if setup.quantized and not setup.software.fsdp:
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


def gathered(shard: StageShard, setup: TrainingSetup) -> float:
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
