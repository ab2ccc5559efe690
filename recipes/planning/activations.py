"""The bytes of activations on one rank: what the layers keep for the backward pass, and what comes and goes."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from recipes.planning.anatomy import Anatomy, Kind, Saved, way
from recipes.planning.setup import Setup

Number = TypeVar("Number", float, Saved)

FP32 = 2
"""How much more fp32 takes than the bf16 that was traced: at most so much, since some of it is in fp32 already."""
TILED = 1 / 3
"""What a loss in pieces takes of the usual one: 4 of 12 bytes per token and entry of the vocabulary."""
NOTHING = Saved(0)


def traced(values: Mapping[str, Number], setup: Setup) -> Number:
    """Return what was traced of the way in which `setup` trains, for its adapters' rank."""
    name = way(setup.lora)
    return values[name] if setup.lora is None else values[name] + setup.lora.rank * values[f"{name} rank"]


def adapter_parameters(kind: Kind, setup: Setup) -> float:
    """Return the parameters of a layer's adapters."""
    return traced(kind.adapters, setup) if setup.lora else 0.0


def is_masked(kind: Kind, setup: Setup) -> bool:
    """Return whether attention gets a mask of all pairs: several documents in a row, or a window shorter than it."""
    if setup.attention != "sdpa" or not kind.attention_width:
        return False
    return setup.packing or (kind.window is not None and kind.window <= setup.sequence_length)


def layer_bytes(kind: Kind, setup: Setup) -> float:
    """Return what autograd keeps of a layer for one micro-batch."""
    layout, rows, length = setup.layout, setup.forward_rows, setup.sequence_length
    split = (1 - 1 / layout.tensor) * kind.saved.get("split", NOTHING)
    saved = traced(kind.saved, setup) + -1 * split
    shared = length / layout.sequence
    total = rows * (saved.per_token * shared + saved.per_pair * length * shared) + saved.fixed
    if is_masked(kind, setup):
        # Repeated keys and values are shared like all heads; every rank has the whole mask.
        more = kind.saved.get("masked", NOTHING)
        total += rows * (more.per_token * shared / layout.tensor + more.per_pair * length**2)
    elif setup.attention == "eager":
        more = kind.saved.get("eager", NOTHING)
        total += rows * (more.per_token + more.per_pair * length) * shared / layout.tensor
    return _widened(total, setup)


def kept_bytes(kind: Kind, setup: Setup) -> float:
    """Return what is left of a layer after its forward pass: everything, or with checkpointing its input."""
    if not setup.gradient_checkpointing:
        return layer_bytes(kind, setup)
    return _widened(kind.checkpoint * setup.forward_rows * setup.sequence_length / setup.layout.sequence, setup)


def backward_bytes(kind: Kind, setup: Setup) -> float:
    """Return what a layer's backward pass takes beyond what was kept, with the forward pass that is done again."""
    split = (1 - 1 / setup.layout.tensor) * kind.working.get("split", NOTHING)
    working = traced(kind.working, setup) + -1 * split
    taken = working.of(setup.forward_rows, setup.sequence_length / setup.layout.sequence)
    again = layer_bytes(kind, setup) if setup.gradient_checkpointing else 0.0
    # In batches smaller than those that were traced, the gradient of the largest weight is the worst.
    return again + _widened(max(taken, 2.0 * kind.largest if setup.lora is None else 0.0), setup)


def mask_bytes(kinds: Iterable[Kind], setup: Setup) -> float:
    """Return the bytes of masks, one of all pairs for each width of window: truth values; eager attention: numbers."""
    eager = setup.attention == "eager"
    windows = {kind.window for kind in kinds if eager or is_masked(kind, setup)}
    return len(windows) * setup.forward_rows * setup.sequence_length**2 * (2 if eager else 1)


def loss_bytes(anatomy: Anatomy, setup: Setup) -> float:
    """Return what norm, head and loss take at their worst moment: the logits, several times."""
    both = traced(anatomy.ends, setup) + traced(anatomy.loss, setup)
    length = setup.sequence_length / setup.layout.sequence
    tokens = length * setup.forward_rows
    total = (both.per_token * tokens + both.fixed) * (TILED if setup.tiles(anatomy.vocabulary) else 1)
    gradient = 2 * anatomy.vocabulary * anatomy.hidden if setup.lora is None else 0.0
    return _widened(max(total, gradient), setup)


def _widened(total: float, setup: Setup) -> float:
    return total * (FP32 if setup.precision == "fp32" else 1)
