"""Whether training has changed the weights: a sample of the trained ones, kept at the start and compared at the end."""

import random
from typing import Any

import torch

TENSORS, ELEMENTS = 256, 2**14
"""How much is kept on each rank: of so many tensors, at most so many elements; 16 MiB at most in fp32."""

LEAST = 1e-12
"""A smaller change is none: next to weights of 1e-2 fp32 drops it, but a zero, as in a new adapter, keeps it."""

Sample = dict[str, torch.Tensor]


def sample(model: Any) -> Sample:
    """Return a copy of some of the trained weights that this rank holds, in host memory."""
    held = {name: weight for name, weight in _held(model).items() if weight.numel()}
    chosen = random.Random(0).sample(sorted(held), min(TENSORS, len(held)))
    return {name: _head(held[name]) for name in chosen}


def moved(before: Sample, model: Any) -> bool:
    """Return whether any of the sampled weights has changed on this rank."""
    held = _held(model)
    pairs = [(_head(held[name]).float(), weight.float()) for name, weight in before.items() if name in held]
    return any(not (after - weight).abs().max() <= LEAST for after, weight in pairs)  # NaN counts as moved


def _held(model: Any) -> Sample:
    """Return the trained weights in memory: of those that ZeRO-3 shards, this rank's part, unless it is on NVMe."""
    trained = ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
    held = {name: getattr(weight, "ds_tensor", weight) for name, weight in trained}
    return {name: part.detach() for name, part in held.items() if getattr(part, "final_location", None) != "nvme"}


def _head(weight: torch.Tensor) -> torch.Tensor:
    return weight.flatten()[:ELEMENTS].to("cpu", copy=True)
