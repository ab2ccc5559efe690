"""Detects whether training has changed the weights, by comparing a sample of them at the start and at the end."""

import random
from typing import Any

import torch

TENSORS, ELEMENTS = 256, 2**14
"""Size of the sample on each rank: number of tensors, and elements per tensor; at most 16 MiB in fp32."""

LEAST = 1e-12
"""Smaller changes are ignored: fp32 drops them in weights of 1e-2, but a zero, as in a new adapter, keeps them."""

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
    """Return the trained weights in memory: with ZeRO-3 this rank's shards, except those on NVMe."""
    trained = ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
    held = {name: getattr(weight, "ds_tensor", weight) for name, weight in trained}
    return {name: part.detach() for name, part in held.items() if getattr(part, "final_location", None) != "nvme"}


def _head(weight: torch.Tensor) -> torch.Tensor:
    return weight.flatten()[:ELEMENTS].to("cpu", copy=True)
