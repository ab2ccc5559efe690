"""The share of the learning rate of each weight: layer-wise rates, and LoRA+'s for both sides of an adapter."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...recipe.recipe import Recipe

LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
"""Matches the number of a layer in a weight's name, in transformers' decoders."""
EMBEDDING_ADAPTER = "lora_embedding_"
EMBEDDING_RATE = 1e-6
"""Rate of adapters on embeddings under LoRA+, whatever the other rates are: PEFT's `loraplus_lr_embedding`."""

Group = dict[str, Any]
"""A parameter group of an optimizer: `params`, and their options."""


def apart(recipe: Recipe) -> bool:
    """Return whether some weights learn at other rates than others."""
    return recipe.layer_decay < 1 or (recipe.lora is not None and recipe.lora.plus_ratio != 1)


def shares(recipe: Recipe, names: Iterable[str]) -> dict[str, float]:
    """Return the share of the learning rate of each weight.

    Args:
        recipe: sets the rates.
        names: all weights of the model, including frozen ones, in its order: embeddings, layers, norm and head.
    """
    known = list(names)
    return {name: depth * _side(recipe, name) for name, depth in _by_layer(known, recipe.layer_decay).items()}


def _by_layer(names: list[str], decay: float) -> dict[str, float]:
    """Return `decay` to the number of steps from the head down to each weight; the last layer is one step below it."""
    layers = {name: int(found[1]) for name in names if (found := LAYER.search(name))}
    count = 1 + max(layers.values(), default=-1)
    first = next((index for index, name in enumerate(names) if name in layers), 0)
    below = {name: count - layers[name] for name in layers}
    ends = {name: count + 1 if index < first else 0 for index, name in enumerate(names) if name not in layers}
    return {name: decay ** (below | ends)[name] for name in names}


def _side(recipe: Recipe, name: str) -> float:
    """Return LoRA+'s factor, by PEFT's grouping (`create_loraplus_optimizer`).

    PEFT's function takes every weight with one dimension for a B, and under ZeRO-3 every weight has one dimension.
    """
    lora = recipe.lora
    if lora is None or lora.plus_ratio == 1:
        return 1.0
    if EMBEDDING_ADAPTER in name:
        return EMBEDDING_RATE / recipe.learning_rate
    fast = "lora_B" in name or "lora_magnitude" in name or name.endswith(".bias")
    return lora.plus_ratio if fast else 1.0


def split(groups: Iterable[Group], rate: float, share: Mapping[torch.Tensor, float]) -> list[Group]:
    """Return the groups, each divided by its weights' shares of `rate`; the full rate first, which is then logged."""
    parts: list[tuple[float, Group]] = []
    for group in groups:
        found = sorted({share[weight] for weight in group["params"]})
        for one in found:
            weights = [weight for weight in group["params"] if share[weight] == one]
            parts.append((one, {**group, "params": weights, "lr": rate * one}))
    return [group for _, group in sorted(parts, key=lambda part: abs(part[0] - 1))]
