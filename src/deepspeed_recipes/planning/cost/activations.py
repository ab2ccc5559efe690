"""Activation memory on one rank: tensors that layers save for the backward pass, and the peaks of both passes."""

import math
from collections.abc import Iterable, Mapping
from math import prod
from typing import TypeVar

from ...recipe.recipe import Lora
from ..model_profile.profile import LayerProfile, ModelProfile, SavedBytes, training_mode
from .training_setup import TrainingSetup

Number = TypeVar("Number", float, SavedBytes)

FP32 = 2
"""Factor from the profiled bf16 to fp32. It is an upper bound, since some activations are in fp32 already."""
PROFILED_LOGITS = 12
"""Bytes per token and vocabulary entry of whole logits at their peak, in the backward pass of the loss: probabilities
and two gradients, in fp32 (transformers 5.22, loss/loss_utils.py)."""
TOO_SMALL_LOGITS = 2
"""Bytes per token and vocabulary entry that are reserved but unusable at that peak: the block of the bf16 logits is
free, but too small for a gradient in fp32."""
TILE_TOKENS, TILE_COLUMNS = 4096, 8192
"""Size of the single tile of logits that exists at a time, in tokens (trl, kernels/chunked_logprob.py,
TOKEN_CHUNK_SIZE) and vocabulary entries (`training.model.transforms.COLUMNS`)."""
TILE = 2 * TILE_TOKENS * TILE_COLUMNS
"""Bytes of that tile in bf16; Triton's kernels turn it into its gradient in place."""
GRADIENTS_IN_TILES = 6
"""Bytes per element of the gradients that are summed over tiles: the sum in fp32 and the returned copy in bf16."""
HIDDEN_IN_TILES = 2.5
"""Bytes per token and hidden unit that norm and loss keep beyond the layers' own; profiled with Llama's norm."""
NORM_AFTER_TILES = 20.5
"""Bytes per token and hidden unit at the peak of the last norm's backward pass, in fp32; profiled with Llama's norm."""
NORM = 8
"""Bytes of the last norm per token and hidden unit: its input in bf16 and in fp32, and its output in bf16."""
INNER = 4
"""Bytes per token and output of a feed-forward layer's inner matrices, in bf16: the output and the result of the next
operation."""
INNER_FUSED = 3
"""The same with Liger's kernels, which recompute the activation function (liger_kernel, ops/swiglu.py), and with
torch.compile, which recomputes all element-wise operations (measured in tests/test_tiled_memory.py)."""
NORM_FUSED = 4
"""Bytes per token and hidden unit that a fused norm saves less than an unfused one if its weight is trained, and half
as many otherwise: it keeps its input in bf16 instead of a normalised copy in fp32 (liger_kernel, ops/rms_norm.py;
transformers' LlamaRMSNorm)."""
NORMS = 2
"""Norms per layer."""
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
    own_length = length / setup.layout.sequence
    saved = of_mode(kind.saved, setup.lora) + (1 / tensor - 1) * kind.saved.get("split", NOTHING)
    total = sequences * (saved.per_token * own_length + saved.per_pair * length * own_length) + saved.fixed
    if is_masked(kind, setup):
        # Repeated keys and values are divided over ranks like all heads; every rank has the whole mask.
        more = kind.saved.get("masked", NOTHING)
        total += sequences * (more.per_token * own_length / tensor + more.per_pair * length**2)
    total += sequences * _eager(kind.saved, setup).per_token * own_length / tensor
    total += sequences * own_length * _frozen_inputs(kind, setup)
    if setup.software.tensor_splits_all:
        total = of_mode(kind.saved, setup.lora).of(sequences, own_length) / tensor
    if setup.fuses:  # fused norms and gated activation functions save less
        norms = NORMS * NORM_FUSED / (1 if setup.lora is None else 2) * kind.checkpoint_bytes / 2
        inner = (INNER - INNER_FUSED) * _inner_results(kind) / tensor if _is_gated(kind) else 0
        total -= sequences * own_length * (norms / (tensor if setup.software.tensor_splits_all else 1) + inner)
    return _in_precision(total, setup) + _scores(kind.saved, setup)


def _frozen_inputs(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return the bytes per token of frozen matrices' inputs, which ZeRO-3 saves although no gradient needs them.

    `LinearFunctionForZeroStage3` (deepspeed 0.19.8, zero/linear.py) saves every input. Not counted here: the input of
    attention's last matrix, which attention saves anyway, and the inputs of matrices with an adapter without dropout,
    which the adapter saves. 4-bit matrices do not use this function.
    """
    if setup.zero_stage < 3 or setup.software.fsdp or setup.lora is None or setup.lora.fused or setup.quantized:
        return 0.0
    inner = sum(inputs for inputs, _ in kind.feed_forward[-1:])
    feed_forward = kind.checkpoint_bytes + 2 * inner / setup.layout.tensor if inner else 0.0
    if setup.lora.dropout:
        return feed_forward + kind.checkpoint_bytes
    return 0.0 if setup.lora.target_modules == "all-linear" else feed_forward


def _eager(profiled: Mapping[str, SavedBytes], setup: TrainingSetup) -> SavedBytes:
    return profiled.get("eager", NOTHING) if setup.attention == "eager" else NOTHING


def _scores(profiled: Mapping[str, SavedBytes], setup: TrainingSetup) -> float:
    """Return the bytes of eager attention's saved scores, or of their gradients.

    The total is the same in bf16 and fp32: in bf16 the probabilities also exist in fp32; in fp32 they exist once, but
    their gradients are twice as large.
    """
    pairs = setup.sequence_length**2 / setup.layout.sequence / setup.layout.tensor
    return setup.sequences_per_pass * _eager(profiled, setup).per_pair * pairs


def _is_gated(kind: LayerProfile) -> bool:
    """Return whether a layer's feed-forward part has a gate; False for routed experts, which have their own kernels."""
    if kind.expert_parameters or not kind.feed_forward:
        return False
    width, _ = kind.feed_forward[-1]
    return _inner_results(kind) == 2 * width


def _inner_results(kind: LayerProfile) -> int:
    """Return the outputs per token of the inner matrices of a layer's feed-forward part."""
    return sum(outputs for _, outputs in kind.feed_forward[:-1])


def feed_forward_bytes(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return the bytes that autograd saves inside a layer's feed-forward part for one micro-batch, beyond its input.

    These are the outputs of the inner matrices and of the activation function or the product with the gate, which is
    the last matrix's input.
    """
    inner = _inner_results(kind)
    tokens = setup.sequences_per_pass * setup.sequence_length / setup.layout.sequence
    each = INNER_FUSED if setup.fuses and _is_gated(kind) else INNER
    return _in_precision(each * tokens * inner / setup.layout.tensor, setup)


def kept_bytes(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return the bytes kept of a layer after its forward pass: all saved tensors, or with checkpointing its input."""
    if setup.selective:  # the results of matrix products and of attention, too
        adapters = sum(setup.lora.rank + outputs for _, outputs in kind.linears) if setup.lora else 0
        dense = sum(outputs for _, outputs in kind.linears) + adapters
        results = dense + _attention_results(kind, setup) + _expert_results(kind)
        return _in_precision((kind.checkpoint_bytes + 2 * results) * _tokens(setup), setup)
    if setup.recomputes_layers:
        width = FP32 if setup.software.frozen_fp32 else 1
        return width * _in_precision(kind.checkpoint_bytes * _tokens(setup), setup)
    again = feed_forward_bytes(kind, setup) if setup.recomputes_feed_forward else 0.0
    return layer_bytes(kind, setup) - again


def _attention_results(kind: LayerProfile, setup: TrainingSetup) -> int:
    """Return the outputs per token of attention, or 0 for eager attention."""
    return 0 if setup.attention == "eager" else kind.attention_width


def _expert_results(kind: LayerProfile) -> float:
    """Return the outputs per token of a layer's expert matrices.

    The three matrices of a gated expert have the same size, and the outputs of two of them have the expert's width.
    """
    if not kind.experts_per_token:
        return 0.0
    hidden, dense = kind.checkpoint_bytes / 2, sum(map(prod, kind.linears))
    return 2 / 3 * (kind.active_weights - dense) / hidden + kind.experts_per_token * hidden


def backward_bytes(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return the bytes that a layer's backward pass needs beyond the kept ones, recomputed activations included."""
    split = (1 / setup.layout.tensor - 1) * kind.backward_peak.get("split", NOTHING)
    own_length = setup.sequence_length / setup.layout.sequence
    needed = (of_mode(kind.backward_peak, setup.lora) + split).of(setup.sequences_per_pass, own_length)
    per_token = _eager(kind.backward_peak, setup).per_token
    more = _in_precision(setup.sequences_per_pass * per_token * own_length, setup)
    scores = max(0.0, more + _scores(kind.backward_peak, setup))
    # In batches smaller than the profiled ones, the gradient of the largest weight is the peak.
    gradient = 2.0 * kind.largest_module if setup.lora is None else 0.0
    return _recomputed_bytes(kind, setup) + _in_precision(max(needed, gradient), setup) + scores


def _recomputed_bytes(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return the bytes of a layer's recomputed activations; a tiled feed-forward part is recomputed tile by tile."""
    feed_forward = feed_forward_bytes(kind, setup)
    tiles, own_length = 1, setup.sequence_length / setup.layout.sequence
    if setup.tiled_mlp:  # `training.model.transforms.tile_count`
        tiles = max(2, math.ceil(own_length / (kind.checkpoint_bytes // 2)))
    tile = feed_forward / tiles
    if setup.selective:  # the kept outputs of gates, experts and attention are used directly
        used = _inner_results(kind) + _expert_results(kind) + _attention_results(kind, setup)
        return layer_bytes(kind, setup) - _in_precision(2 * used * _tokens(setup), setup)
    if setup.recomputes_layers:
        return layer_bytes(kind, setup) - feed_forward + tile
    return tile if setup.recomputes_feed_forward else 0.0


def mask_bytes(kinds: Iterable[LayerProfile], setup: TrainingSetup) -> float:
    """Return the bytes of full attention masks, one per window width: booleans, or bf16 numbers for eager attention."""
    eager = setup.attention == "eager"
    windows = {kind.window for kind in kinds if eager or is_masked(kind, setup)}
    return len(windows) * setup.sequences_per_pass * setup.sequence_length**2 * (2 if eager else 1)


def loss_bytes(profile: ModelProfile, setup: TrainingSetup) -> float:
    """Return the bytes that norm, head and loss need at their peak: several copies of the logits, or a tile of them."""
    tokens = _tokens(setup)
    if setup.scores:  # a reward is one number per sequence, so only the last norm counts
        return _in_precision(NORM * tokens * profile.hidden_size, setup)
    head = profile.vocab_size * profile.hidden_size if setup.lora is None else 0
    if setup.tiles(profile.vocab_size):
        return _in_precision(_tiled_loss_bytes(tokens, profile.hidden_size, head), setup)
    both = of_mode(profile.saved_outside_layers, setup.lora) + of_mode(profile.loss_peak, setup.lora)
    other = 0.0 if setup.software.logit_bytes is None else setup.software.logit_bytes - PROFILED_LOGITS
    total = both.per_token * tokens + both.fixed + other * tokens * profile.vocab_size
    total -= PROFILED_LOGITS * (1 - setup.labelled_share) * tokens * profile.vocab_size
    if setup.software.frozen_fp32:  # autocast's copy of the head, which the backward pass needs too
        total += 2 * profile.vocab_size * profile.hidden_size
    return _in_precision(max(total, 2.0 * head), setup)


def unusable_logits_bytes(profile: ModelProfile, setup: TrainingSetup) -> float:
    """Return the bytes that the caching allocator reserves but cannot use at the peak of whole logits."""
    whole = not (setup.scores or setup.tiles(profile.vocab_size))
    if not whole or setup.software.logit_bytes is not None or setup.precision == "fp32":
        return 0.0
    tokens = _tokens(setup)
    return TOO_SMALL_LOGITS * setup.labelled_share * tokens * profile.vocab_size


def _tiled_loss_bytes(tokens: float, hidden: int, trained: int) -> float:
    """Return the peak bytes of a tiled loss: at the end of the tiles, or in the norm's backward pass after them.

    `trained` is the number of the head's weights that get a gradient.
    """
    added_up = HIDDEN_IN_TILES * tokens * hidden + GRADIENTS_IN_TILES * (tokens * hidden + trained)
    return max(added_up + TILE, NORM_AFTER_TILES * tokens * hidden)


def _tokens(setup: TrainingSetup) -> float:
    """Return the number of tokens per pass whose hidden states and logits are on one rank."""
    ranks = setup.layout.sequence * (setup.layout.tensor if setup.software.tensor_splits_all else 1)
    return setup.sequences_per_pass * setup.sequence_length / ranks


def _in_precision(total: float, setup: TrainingSetup) -> float:
    return total * (FP32 if setup.precision == "fp32" else 1)
