"""Measures the bytes of weights and optimizer states that this rank holds between steps, layer by layer."""

import re
from collections.abc import Iterator
from typing import Any

import torch

_LAYER = re.compile(r"(.*?\.)?\d+(?=\.)")


def layers(engine: Any) -> list[dict[str, Any]]:
    """Return the bytes of each layer that this rank holds, in the model's order: `name`, `parameters`, `optimizer`.

    Measured on the tensors themselves, wherever they are except on NVMe. A tensor in which the optimizer holds several
    layers is divided in proportion to the weights that this rank updates in each. No collective.
    """
    named = list(engine.module.named_parameters())
    held = {_storage(part) for _, weight in named for part in _parts(weight)}
    states = {_storage(one): one for one in _states(engine)}
    optimizer = sum(one.untyped_storage().nbytes() for key, one in states.items() if key not in held)
    updated = {name: _updated(weight) for name, weight in named if weight.requires_grad}
    each = optimizer / (sum(updated.values()) or 1)
    found: dict[str, dict[str, Any]] = {}
    for name, weight in named:
        layer = found.setdefault(layer_of(name), {"name": layer_of(name), "parameters": 0, "optimizer": 0})
        layer["parameters"] += sum(part.nbytes for part in _parts(weight))
        layer["optimizer"] += round(each * updated.get(name, 0))
    return list(found.values())


def layer_of(name: str) -> str:
    """Return the layer of a parameter: `model.layers.3`, or the parameter's module where layers have no number."""
    numbered = _LAYER.match(name)
    return numbered[0] if numbered else name.rpartition(".")[0]


def _parts(weight: Any) -> Iterator[torch.Tensor]:
    """Yield the held parts of a weight: all of it or, under ZeRO-3, this rank's part, and also small weights whole."""
    shard = getattr(weight, "ds_tensor", None)
    if shard is None or weight.numel() == weight.ds_numel:
        yield weight.detach()
    if shard is not None and getattr(shard, "final_location", None) != "nvme":
        yield shard.detach()


def _updated(weight: Any) -> int:
    """Return the number of a weight's elements that this rank's optimizer updates."""
    if hasattr(weight, "ds_tensor"):
        return weight.ds_tensor.numel()
    if hasattr(weight, "_hp_mapping"):  # ZeRO 1 and 2: the fragment of the flat partition, None outside of it
        return weight._hp_mapping.hp_fragment_address.numel if weight._hp_mapping else 0
    return weight.numel()


def _states(engine: Any) -> Iterator[torch.Tensor]:
    """Yield the optimizer's tensors: moments, and the fp32 weights that it updates."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    for group in inner.param_groups:
        yield from group["params"]
    yield from (value for state in inner.state.values() for value in state.values() if torch.is_tensor(value))
    yield from getattr(engine.optimizer, "fp32_partitioned_groups_flat", ())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
