"""Activation memory on one rank: tensors that layers save for the backward pass, and the peaks of both passes."""

import math
from collections.abc import Iterable, Mapping
from math import prod
from typing import TypeVar

from ...recipe.recipe import Lora
from ..model_profile.profile import LayerProfile, ModelProfile, SavedBytes, training_mode
from .constants import COUNTS
from .training_setup import TrainingSetup

Number = TypeVar("Number", float, SavedBytes)

FP32 = 2
"""Factor from the profiled bf16 to fp32, an upper bound: some activations are in fp32 already."""
NOTHING = SavedBytes(0)


def of_mode(values: Mapping[str, Number], lora: Lora | None) -> Number:
    """Return the profiled value for the training mode and the rank of the adapters."""
    mode = training_mode(lora)
    return values[mode] if lora is None else values[mode] + lora.rank * values[f"{mode} rank"]


def is_masked(kind: LayerProfile, setup: TrainingSetup) -> bool:
    """Return whether attention gets a full mask: for packed documents, or for a window shorter than the sequence."""
    if setup.attention != "sdpa" or not kind.attention_width:
        return False
    return setup.packing or (kind.window is not None and kind.window <= setup.sequence_length)


def layer_bytes(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return the bytes that autograd saves in a layer for one micro-batch."""
    tensor, sequences, length = setup.layout.tensor, setup.sequences_per_pass, setup.sequence_length
    tokens, saved = setup.tokens_per_pass, of_mode(kind.saved, setup.lora)
    saved += (1 / tensor - 1) * kind.saved.get("split", NOTHING)
    frozen, lora = 0.0, setup.lora
    if lora and not lora.fused and setup.zero_stage == 3 and not setup.quantized:
        # The inputs of frozen matrices, for which no gradient needs them: `LinearFunctionForZeroStage3` (deepspeed
        # 0.19.8, zero/linear.py), which 4-bit matrices do not use, saves every input. Attention saves its last matrix's
        # input anyway, and adapters without dropout save those of their matrices.
        width = sum(inputs for inputs, _ in kind.feed_forward[-1:])
        if lora.dropout or lora.target_modules != "all-linear":
            frozen = kind.checkpoint_bytes + 2 * width / tensor if width else 0.0
        if lora.dropout:
            frozen += kind.checkpoint_bytes
    total = tokens * (saved.per_token + saved.per_pair * length + frozen) + saved.fixed
    total += tokens * _eager(kind.saved, setup).per_token / tensor
    if is_masked(kind, setup):
        # Repeated keys and values are divided over ranks like all heads; every rank has the whole mask.
        more = kind.saved.get("masked", NOTHING)
        total += tokens * more.per_token / tensor + sequences * more.per_pair * length**2
    if setup.fuses:
        norms = COUNTS.fused_norm_saves / (1 if setup.lora is None else 2) * kind.checkpoint_bytes
        inner = (COUNTS.inner - COUNTS.inner_fused) * _inner_results(kind) / tensor if _is_gated(kind) else 0
        total -= tokens * (norms + inner)
    return _in_layers(total, setup) + _scores(kind.saved, setup)


def _eager(profiled: Mapping[str, SavedBytes], setup: TrainingSetup) -> SavedBytes:
    return profiled.get("eager", NOTHING) if setup.attention == "eager" else NOTHING


def _scores(profiled: Mapping[str, SavedBytes], setup: TrainingSetup) -> float:
    """Return the bytes of eager attention's saved scores, or of their gradients.

    They are as many in bf16, where the probabilities also exist in fp32, as in fp32, where gradients are twice as wide.
    """
    return setup.tokens_per_pass * setup.sequence_length * _eager(profiled, setup).per_pair / setup.layout.tensor


def _is_gated(kind: LayerProfile) -> bool:
    """Return whether a layer's feed-forward part has a gate; False for routed experts, which have their own kernels."""
    gated = bool(kind.feed_forward) and _inner_results(kind) == 2 * kind.feed_forward[-1][0]
    return gated and not kind.expert_parameters


def _inner_results(kind: LayerProfile) -> int:
    """Return the outputs per token of the inner matrices of a layer's feed-forward part."""
    return sum(outputs for _, outputs in kind.feed_forward[:-1])


def feed_forward_bytes(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return the bytes that autograd saves inside a layer's feed-forward part for one micro-batch, beyond its input."""
    each = COUNTS.inner_fused if setup.fuses and _is_gated(kind) else COUNTS.inner
    return _in_layers(each * setup.tokens_per_pass * _inner_results(kind) / setup.layout.tensor, setup)


def kept_bytes(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return the bytes kept of a layer after its forward pass: all saved tensors, or with checkpointing its input."""
    if setup.selective:  # the results of matrix products and of attention, too
        adapters = sum(setup.lora.rank + outputs for _, outputs in kind.linears) if setup.lora else 0
        results = sum(outputs for _, outputs in kind.linears) + adapters + _kept_results(kind, setup)
        return _in_layers((kind.checkpoint_bytes + 2 * results) * setup.tokens_per_pass, setup)
    if setup.recomputes_layers:
        return _in_layers(kind.checkpoint_bytes * setup.tokens_per_pass, setup)
    again = feed_forward_bytes(kind, setup) if setup.recomputes_feed_forward else 0.0
    return layer_bytes(kind, setup) - again


def _kept_results(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return the outputs per token that selective checkpointing keeps of fused attention and of expert matrices.

    The three matrices of a gated expert have the same size, and the outputs of two of them have the expert's width.
    """
    attention = 0 if setup.attention == "eager" else kind.attention_width
    if not kind.experts_per_token:
        return attention
    hidden = kind.checkpoint_bytes / 2
    width = 2 / 3 * (kind.active_weights - sum(map(prod, kind.linears))) / hidden
    return attention + width + kind.experts_per_token * hidden


def backward_bytes(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return the bytes that a layer's backward pass needs beyond the kept ones, recomputed activations included."""
    split = (1 / setup.layout.tensor - 1) * kind.backward_peak.get("split", NOTHING)
    needed = (of_mode(kind.backward_peak, setup.lora) + split).of(setup.sequences_per_pass, setup.own_length)
    more = _in_precision(setup.tokens_per_pass * _eager(kind.backward_peak, setup).per_token, setup)
    scores = max(0.0, more + _scores(kind.backward_peak, setup))
    # In batches smaller than the profiled ones, the gradient of the largest weight is the peak.
    gradient = 2.0 * kind.largest_module if setup.lora is None else 0.0
    recomputed, tiles, feed_forward = 0.0, 1, feed_forward_bytes(kind, setup)
    if setup.tiled_mlp:  # recomputed tile by tile: `training.model.transforms.apply`
        tiles = max(2, math.ceil(setup.own_length / (kind.checkpoint_bytes // 2)))
    if setup.selective:  # the kept outputs of gates, experts and attention are used directly
        used = _inner_results(kind) + _kept_results(kind, setup)
        recomputed = layer_bytes(kind, setup) - _in_layers(2 * used * setup.tokens_per_pass, setup)
    elif setup.recomputes_layers:
        recomputed = layer_bytes(kind, setup) - feed_forward + feed_forward / tiles
    elif setup.recomputes_feed_forward:
        recomputed = feed_forward / tiles
    return recomputed + _in_precision(max(needed, gradient), setup) + scores


def mask_bytes(kinds: Iterable[LayerProfile], setup: TrainingSetup) -> float:
    """Return the bytes of full attention masks, one per window width: booleans, or bf16 numbers for eager attention."""
    eager = setup.attention == "eager"
    windows = {kind.window for kind in kinds if eager or is_masked(kind, setup)}
    return len(windows) * setup.sequences_per_pass * setup.sequence_length**2 * (2 if eager else 1)


def loss_bytes(profile: ModelProfile, setup: TrainingSetup) -> tuple[float, float]:
    """Return the bytes that norm, head and loss need at their peak, and those that are then reserved but unusable.

    There are several copies of the logits, or a tile of them.
    """
    tokens, hidden, vocabulary = setup.tokens_per_pass, profile.hidden_size, profile.vocab_size
    head = vocabulary * hidden if setup.lora is None else 0  # weights that get a gradient
    if setup.scores:  # a reward is one number per sequence, so only the last norm counts
        return _in_precision(COUNTS.last_norm * tokens * hidden, setup), 0.0
    if setup.tiles(vocabulary):  # the peak is at the end of the tiles, or in the norm's backward pass after them
        summed = COUNTS.tile_hidden * tokens * hidden + COUNTS.tile_gradients * (tokens * hidden + head)
        summed += 2 * COUNTS.tile_tokens * COUNTS.tile_columns
        return _in_precision(max(summed, COUNTS.norm_after_tiles * tokens * hidden), setup), 0.0
    saved = (1 + setup.further_token) * of_mode(profile.saved_outside_layers, setup.lora)
    both = saved + of_mode(profile.loss_peak, setup.lora)
    per_logit = setup.software.logit_bytes
    unlabelled = COUNTS.profiled_logits * (1 - setup.labelled_share)
    other = (0.0 if per_logit is None else per_logit - COUNTS.profiled_logits) - unlabelled
    total = tokens * (both.per_token + other * vocabulary) + both.fixed
    if setup.software.frozen_fp32:  # autocast's copy of the head, which the backward pass needs too
        total += 2 * vocabulary * hidden
    unusable = COUNTS.unusable_logits * setup.labelled_share * tokens * vocabulary
    unusable = 0.0 if per_logit is not None or setup.precision == "fp32" else unusable
    return _in_precision(max(total, 2.0 * head), setup), unusable


def _in_layers(total: float, setup: TrainingSetup) -> float:
    # Norms in fp32 return fp32, and 4-bit matrices their input's type (bitsandbytes, nn/modules.py, Linear4bit).
    return FP32 * total if setup.software.frozen_fp32 else _in_precision(total, setup)


def _in_precision(total: float, setup: TrainingSetup) -> float:
    return total * (FP32 if setup.precision == "fp32" else 1)
