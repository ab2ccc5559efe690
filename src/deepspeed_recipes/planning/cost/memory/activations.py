"""Activation memory on one rank: what layers save for the backward pass, and what their passes need at their peak."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TypeVar

from ...model_profile.profile import LayerProfile, ModelProfile, SavedBytes, training_mode
from ..training_setup import TrainingSetup
from .states import WIDTH

Number = TypeVar("Number", float, SavedBytes)

FP32 = 2
"""How much more fp32 takes than the bf16 that was profiled: an upper bound, since some of it is in fp32 already."""
PROFILED_LOGITS = 12
"""Bytes per token and vocabulary entry of whole logits at their peak, in the backward pass of the loss: probabilities
and two gradients, in fp32 (transformers 5.22, loss/loss_utils.py)."""
TOO_SMALL_LOGITS = 2
"""Bytes per token and vocabulary entry that are reserved and of no use at that peak: the block of the logits in bf16 is
free, but no gradient in fp32 fits into it."""
TILE_TOKENS, TILE_COLUMNS = 4096, 8192
"""Of the one tile of logits that exists at a time: tokens (trl, kernels/chunked_logprob.py, TOKEN_CHUNK_SIZE), and
vocabulary entries (`training.model.tiling.COLUMNS`)."""
TILE = 2 * TILE_TOKENS * TILE_COLUMNS
"""Bytes of that tile in bf16; Triton's kernels turn it into its gradient in place."""
GRADIENTS_IN_TILES = 6
"""Bytes per number of the gradients that tiles add up: in fp32, and beside that the copy in bf16 that is returned."""
HIDDEN_IN_TILES = 2.5
"""Bytes per token and width that norm and loss keep beyond the layers' own; profiled with Llama's norm."""
NORM_AFTER_TILES = 20.5
"""Bytes per token and width at the peak of the last norm's backward pass, which is in fp32; profiled with Llama's."""
NORM = 8
"""Bytes of the last norm per token and hidden unit in bf16: its input there and in fp32, and its output."""
INNER = 4
"""Bytes per token and output of a feed-forward layer's inner matrices: itself and what follows it, in bf16."""
INNER_FUSED = 3
"""The same with Liger's kernels, which compute the activation function again (liger_kernel, ops/swiglu.py), and with
torch.compile, which does so with all that is element-wise (weighed in tests/test_tiled_memory.py)."""
NORM_FUSED = 4
"""Bytes per token and width that such a norm saves less where its weight is trained, otherwise half of them: it keeps
its input in bf16, and not in fp32 and normalised (liger_kernel, ops/rms_norm.py; transformers' LlamaRMSNorm)."""
NORMS = 2
"""Of a layer."""
NOTHING = SavedBytes(0)


def of_mode(values: Mapping[str, Number], setup: TrainingSetup) -> Number:
    """Return what was profiled for the setup's training mode, at its adapters' rank."""
    mode = training_mode(setup.lora)
    return values[mode] if setup.lora is None else values[mode] + setup.lora.rank * values[f"{mode} rank"]


def adapter_parameters(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return the parameters of a layer's adapters."""
    return of_mode(kind.adapter_parameters, setup) if setup.lora else 0.0


def is_masked(kind: LayerProfile, setup: TrainingSetup) -> bool:
    """Return whether attention gets a mask of all pairs: for packed documents, or a window shorter than a sequence."""
    if setup.attention != "sdpa" or not kind.attention_width:
        return False
    return setup.packing or (kind.window is not None and kind.window <= setup.sequence_length)


def layer_bytes(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return what autograd saves of a layer for one micro-batch."""
    layout, sequences, length = setup.layout, setup.sequences_per_pass, setup.sequence_length
    split = (1 - 1 / layout.tensor) * kind.saved.get("split", NOTHING)
    saved = of_mode(kind.saved, setup) + -1 * split
    own_length = length / layout.sequence
    total = sequences * (saved.per_token * own_length + saved.per_pair * length * own_length) + saved.fixed
    if is_masked(kind, setup):
        # Repeated keys and values are divided like all heads; every rank has the whole mask.
        more = kind.saved.get("masked", NOTHING)
        total += sequences * (more.per_token * own_length / layout.tensor + more.per_pair * length**2)
    total += sequences * _eager(kind.saved, setup).per_token * own_length / layout.tensor
    total += sequences * own_length * _frozen_inputs(kind, setup)
    if setup.tensor_splits_all:
        total = of_mode(kind.saved, setup).of(sequences, own_length) / layout.tensor
    return _in_precision(total - _fused_bytes(kind, setup, sequences * own_length), setup) + _scores(kind.saved, setup)


def _frozen_inputs(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return the bytes per token of inputs of frozen matrices, which ZeRO-3 saves although no gradient needs them.

    `LinearFunctionForZeroStage3` (deepspeed 0.19.8, zero/linear.py) saves every input. That of attention's last matrix
    attention has saved, and an adapter without dropout saves its own; 4-bit matrices are no such functions.
    """
    if setup.zero_stage < 3 or setup.fsdp or setup.lora is None or setup.lora.fused or setup.quantized:
        return 0.0
    inner = sum(inputs for inputs, _ in kind.feed_forward[-1:])
    feed_forward = kind.checkpoint_bytes + 2 * inner / setup.layout.tensor if inner else 0.0
    if setup.lora.dropout:
        return feed_forward + kind.checkpoint_bytes
    return 0.0 if setup.lora.target_modules == "all-linear" else feed_forward


def _eager(profiled: Mapping[str, SavedBytes], setup: TrainingSetup) -> SavedBytes:
    """Return what eager attention needs more than one operator does."""
    return profiled.get("eager", NOTHING) if setup.attention == "eager" else NOTHING


def _scores(profiled: Mapping[str, SavedBytes], setup: TrainingSetup) -> float:
    """Return what eager attention keeps of its scores, or what their gradients need.

    In bf16 the probabilities are there in fp32 too, and in fp32 only once, but their gradients are twice as large: both
    together are the same.
    """
    pairs = setup.sequence_length**2 / setup.layout.sequence / setup.layout.tensor
    return setup.sequences_per_pass * _eager(profiled, setup).per_pair * pairs


def _fused_bytes(kind: LayerProfile, setup: TrainingSetup, tokens: float) -> float:
    """Return what is saved less in a layer whose norms, and activation functions with a gate, are one kernel each."""
    if not setup.fuses:
        return 0.0
    norms = NORMS * NORM_FUSED / (1 if setup.lora is None else 2) * kind.checkpoint_bytes / 2
    inner = _inner_results(kind) if _is_gated(kind) else 0
    ranks = setup.layout.tensor if setup.tensor_splits_all else 1
    return tokens * (norms / ranks + (INNER - INNER_FUSED) * inner / setup.layout.tensor)


def _is_gated(kind: LayerProfile) -> bool:
    """Return whether a layer's feed-forward part multiplies two products; routed experts have kernels of their own."""
    if kind.expert_parameters or not kind.feed_forward:
        return False
    width, _ = kind.feed_forward[-1]
    return _inner_results(kind) == 2 * width


def _inner_results(kind: LayerProfile) -> int:
    """Return the numbers per token that the inner matrices of a layer's feed-forward part return."""
    return sum(outputs for _, outputs in kind.feed_forward[:-1])


def feed_forward_bytes(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return what autograd saves inside a layer's feed-forward part for one micro-batch, beyond its input.

    Each of its inner matrices has an output, and the activation function or the product with the gate has another one,
    which the last matrix multiplies.
    """
    inner = _inner_results(kind)
    tokens = setup.sequences_per_pass * setup.sequence_length / setup.layout.sequence
    each = INNER_FUSED if setup.fuses and _is_gated(kind) else INNER
    return _in_precision(each * tokens * inner / setup.layout.tensor, setup)


def kept_bytes(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return what stays of a layer after its forward pass: all that was saved, or with checkpointing its input."""
    if setup.selective:
        return _in_precision(kind.checkpoint_bytes * _tokens(setup), setup) + _product_bytes(kind, setup)
    if setup.recomputes_layers:
        return _in_precision(kind.checkpoint_bytes * _tokens(setup), setup) * (FP32 if setup.frozen_fp32 else 1)
    again = feed_forward_bytes(kind, setup) if setup.recomputes_feed_forward else 0.0
    return layer_bytes(kind, setup) - again


def waiting_bytes(layer_counts: Iterable[tuple[LayerProfile, int]], setup: TrainingSetup) -> float:
    """Return what stays of all layers after their forward passes, wherever it is."""
    return sum(count * kept_bytes(kind, setup) for kind, count in layer_counts)


def _product_bytes(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return the results of a layer's matrix products and of its attention, in bf16, for one micro-batch."""
    results = sum(outputs for _, outputs in kind.linears) + _attention_results(kind, setup) + _expert_results(kind)
    if setup.lora:
        results += sum(setup.lora.rank + outputs for _, outputs in kind.linears)
    return _in_precision(2 * results * _tokens(setup), setup)


def _attention_results(kind: LayerProfile, setup: TrainingSetup) -> int:
    """Return the numbers per token that attention returns, where it is one operator."""
    return 0 if setup.attention == "eager" else kind.attention_width


def _expert_results(kind: LayerProfile) -> float:
    """Return the numbers per token that its experts' matrices return.

    A gated expert's three matrices are equally large, and two of them return its width.
    """
    if not kind.experts_per_token:
        return 0.0
    hidden, dense = kind.checkpoint_bytes / 2, sum(map(prod, kind.linears))
    return 2 / 3 * (kind.active_weights - dense) / hidden + kind.experts_per_token * hidden


def backward_bytes(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return what a layer's backward pass needs beyond what was kept, recomputed activations included."""
    split = (1 - 1 / setup.layout.tensor) * kind.backward_peak.get("split", NOTHING)
    backward_peak = of_mode(kind.backward_peak, setup) + -1 * split
    own_length = setup.sequence_length / setup.layout.sequence
    needed = backward_peak.of(setup.sequences_per_pass, own_length)
    per_token = _eager(kind.backward_peak, setup).per_token
    more = _in_precision(setup.sequences_per_pass * per_token * own_length, setup)
    scores = max(0.0, more + _scores(kind.backward_peak, setup))
    # In batches smaller than those that were profiled, the gradient of the largest weight is the peak.
    gradient = 2.0 * kind.largest_module if setup.lora is None else 0.0
    return _recomputed_bytes(kind, setup) + _in_precision(max(needed, gradient), setup) + scores


def _recomputed_bytes(kind: LayerProfile, setup: TrainingSetup) -> float:
    """Return what is computed again of a layer before its backward pass: its feed-forward part a tile at a time."""
    feed_forward = feed_forward_bytes(kind, setup)
    tile = feed_forward / setup.feed_forward_tiles(kind.checkpoint_bytes // 2)
    if setup.selective:  # what is kept of gates, experts and attention is used as it is
        used = _inner_results(kind) + _expert_results(kind) + _attention_results(kind, setup)
        return layer_bytes(kind, setup) - _in_precision(2 * used * _tokens(setup), setup)
    if setup.recomputes_layers:
        return layer_bytes(kind, setup) - feed_forward + tile
    return tile if setup.recomputes_feed_forward else 0.0


def mask_bytes(kinds: Iterable[LayerProfile], setup: TrainingSetup) -> float:
    """Return the bytes of masks of all pairs, one per window width: booleans, or numbers for eager attention."""
    eager = setup.attention == "eager"
    windows = {kind.window for kind in kinds if eager or is_masked(kind, setup)}
    return len(windows) * setup.sequences_per_pass * setup.sequence_length**2 * (2 if eager else 1)


def loss_bytes(profile: ModelProfile, setup: TrainingSetup) -> float:
    """Return what norm, head and loss need at their peak: the logits, several times, or a tile of them."""
    tokens = _tokens(setup)
    if setup.scores:  # a reward is one number per sequence; what is left is the last norm
        return _in_precision(NORM * tokens * profile.hidden_size, setup)
    head = profile.vocab_size * profile.hidden_size if setup.lora is None else 0
    if setup.tiles(profile.vocab_size):
        return _in_precision(_tiled_loss_bytes(tokens, profile.hidden_size, head), setup)
    both = of_mode(profile.saved_outside_layers, setup) + of_mode(profile.loss_peak, setup)
    other = 0.0 if setup.logit_bytes is None else setup.logit_bytes - PROFILED_LOGITS
    total = both.per_token * tokens + both.fixed + other * tokens * profile.vocab_size
    if setup.frozen_fp32:  # autocast's copy of the head, which the backward pass needs too
        total += 2 * profile.vocab_size * profile.hidden_size
    return _in_precision(max(total, 2.0 * head), setup)


def unusable_logits_bytes(profile: ModelProfile, setup: TrainingSetup) -> float:
    """Return what the caching allocator reserves beside whole logits at their peak, and cannot use."""
    whole = not (setup.scores or setup.tiles(profile.vocab_size))
    if not whole or setup.logit_bytes is not None or setup.precision == "fp32":
        return 0.0
    tokens = _tokens(setup)
    return TOO_SMALL_LOGITS * tokens * profile.vocab_size


def _tiled_loss_bytes(tokens: float, hidden: int, trained: int) -> float:
    """Return the bytes of a loss in tiles: when the tiles are done, or in the norm's backward pass after them.

    Args:
        tokens: that have labels; all of them, where it is not known how many do.
        hidden: width of the model.
        trained: weights of the head that get a gradient.
    """
    added_up = HIDDEN_IN_TILES * tokens * hidden + GRADIENTS_IN_TILES * (tokens * hidden + trained)
    return max(added_up + TILE, NORM_AFTER_TILES * tokens * hidden)


def _tokens(setup: TrainingSetup) -> float:
    """Return the tokens of a pass whose hidden states and logits are on a rank."""
    ranks = setup.layout.sequence * (setup.layout.tensor if setup.tensor_splits_all else 1)
    return setup.sequences_per_pass * setup.sequence_length / ranks


def _in_precision(total: float, setup: TrainingSetup) -> float:
    return total * (FP32 if setup.precision == "fp32" else 1)


def cache_bytes(profile: ModelProfile, layer_counts: Sequence[tuple[LayerProfile, int]], setup: TrainingSetup) -> float:
    """Return what the keys and values of a step's answers take on the rank that writes them, at their longest.

    Linear attention keeps a state instead, which is small.
    """
    tokens = setup.rollout_answers * setup.sequence_length
    shared = profile.key_value_heads / profile.attention_heads
    per_token = sum(count * 2 * kind.attention_width * shared for kind, count in layer_counts)
    return WIDTH[setup.precision] * tokens * per_token
