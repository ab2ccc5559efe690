"""The weights and optimizer states that this rank holds: where, how many bytes of each layer, and whether they move.

A fragment maps a part of a trained weight to the elements of the optimizer's tensor that hold it. A sample of the
weights, compared at the start and at the end, shows whether training has changed them.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.pipe import PipelineModule
from torch import distributed as dist
from transformers import PreTrainedModel

from ...recipe.files import Json
from ...recipe.recipe import Layout
from .. import distributed
from . import tensor
from .pipeline import stage

PEFT = "base_model.model."
"""Prefix that PEFT adds to the model's own names."""


@dataclass(frozen=True)
class Fragment:
    """Consecutive elements of a tensor that the optimizer updates; all belong to one weight."""

    layer: str
    """Name from `layers`."""
    start: int
    numel: int
    """Without padding."""


def layers(engine: DeepSpeedEngine) -> list[str]:
    """Return the layers of the whole model that have trained weights, in its order; a collective.

    `model.embed_tokens`, `model.layers.0`, ..., `model.norm`: the same names in every layout, with adapters too.
    """
    own = dict.fromkeys(map(_layer, dict(_trained(engine))))
    return list(dict.fromkeys(distributed.items_of_all(list(own))))  # ranks are in the order of the stages


def by_tensor(engine: DeepSpeedEngine, layout: Layout) -> dict[int, list[Fragment]]:
    """Return the fragments in each tensor that the optimizer updates, by the tensor's `id`.

    Every element of the model is in the fragments of exactly `copies` ranks. Empty where the way in which DeepSpeed's
    optimizer holds the weights is not supported here: without ZeRO, in fp16.
    """
    optimizer = engine.optimizer
    whole: dict[Any, torch.Tensor] = {}  # without ZeRO: the tensor that is updated for each weight
    if optimizer is engine.basic_optimizer:
        whole = {weight: weight for _, weight in _trained(engine)}
    elif engine.bfloat16_enabled() and hasattr(optimizer, "fp32_groups"):
        for weights, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            whole |= zip(weights, masters, strict=True)
    found: dict[int, list[Fragment]] = {}
    split = {weight for layer in tensor.layers(engine.module).values() for weight in layer.parameters()}
    counted_elsewhere = distributed.place(layout).tensor > 0
    for name, weight in _trained(engine):
        # As DeepSpeed counts for the gradient norm: weights that ranks or stages hold twice count once.
        if (counted_elsewhere and weight not in split) or getattr(weight, "ds_pipe_replicated", False):
            continue
        place = _place(engine, weight)
        if place is None and weight in whole:
            place = whole[weight], 0, weight.numel()
        if place and place[2]:
            found.setdefault(id(place[0]), []).append(Fragment(_layer(name), *place[1:]))
    return found


def copies(engine: DeepSpeedEngine, layout: Layout) -> int:
    """Return how many ranks update the same elements: one with any kind of ZeRO, else all data-parallel ranks."""
    shared = any(hasattr(weight, "ds_tensor") or hasattr(weight, "_hp_mapping") for _, weight in _trained(engine))
    return 1 if shared else dist.get_world_size() // (layout.tensor * layout.pipeline)


def _place(engine: DeepSpeedEngine, weight: torch.nn.Parameter) -> tuple[torch.Tensor, int, int] | None:
    """Return the place of this rank's part of a weight under ZeRO: the tensor, the first element and their number.

    None without ZeRO and for a weight of other ranks.
    """
    optimizer = engine.optimizer
    if hasattr(weight, "ds_tensor"):
        group, start, size = optimizer.grad_position[optimizer.get_param_id(weight)]
        rank = getattr(weight, "ds_zero_partition_rank", None)
        if rank is None:  # DeepSpeed before 0.19.3 does not store it
            rank = dist.get_rank(weight.ds_process_group)
        left = weight.ds_numel - rank * size  # the last shard is padded
        return optimizer.fp32_partitioned_groups_flat[group], start, max(0, min(size, left))
    mapping = getattr(weight, "_hp_mapping", None)  # of ZeRO 1 and 2, whose partitions cut through weights
    if mapping is None:
        return None
    of_zero = getattr(optimizer, "single_partition_of_fp32_groups", None)
    partitions = optimizer.fp32_groups_flat_partition if of_zero is None else of_zero
    address = mapping.get_hp_fragment_address()
    return partitions[mapping.param_group_index], address.start, address.numel


def _trained(engine: DeepSpeedEngine) -> Iterator[tuple[str, Any]]:
    """Yield the trained weights of this rank, by their names in the unsplit model."""
    module = engine.module
    model = stage(module).model if isinstance(module, PipelineModule) else module
    return ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)


def _layer(name: str) -> str:
    return layer_of(name.removeprefix(PEFT))


def layer_bytes(engine: DeepSpeedEngine) -> list[Json]:
    """Return the bytes of each layer that this rank holds, in the model's order: `name`, `parameters`, `optimizer`.

    Measured on the tensors themselves, wherever they are except on NVMe. A tensor in which the optimizer holds several
    layers is divided in proportion to the weights that this rank updates in each. No collective.
    """
    named = list(engine.module.named_parameters())
    held = {_storage(part) for _, weight in named for part in _parts(weight)}
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    states = [one for group in inner.param_groups for one in group["params"]]  # in fp32, as it updates them
    states += [one for state in inner.state.values() for one in state.values() if torch.is_tensor(one)]
    states += getattr(engine.optimizer, "fp32_partitioned_groups_flat", ())
    storages = {_storage(one): one.untyped_storage().nbytes() for one in states}
    optimizer = sum(size for key, size in storages.items() if key not in held)
    updated: dict[str, int] = {}
    for name, weight in named:
        if hasattr(weight, "ds_tensor"):
            count = weight.ds_tensor.numel()
        elif hasattr(weight, "_hp_mapping"):  # ZeRO 1 and 2: the fragment of the flat partition, None outside of it
            count = weight._hp_mapping.hp_fragment_address.numel if weight._hp_mapping else 0
        else:
            count = weight.numel()
        updated[name] = count if weight.requires_grad else 0
    each = optimizer / (sum(updated.values()) or 1)
    found: dict[str, Json] = {}
    for name, weight in named:
        layer = found.setdefault(layer_of(name), {"name": layer_of(name), "parameters": 0, "optimizer": 0})
        layer["parameters"] += sum(part.nbytes for part in _parts(weight))
        layer["optimizer"] += round(each * updated[name])
    return list(found.values())


def layer_of(name: str) -> str:
    """Return the layer of a parameter: `model.layers.3`, or the parameter's module where layers have no number."""
    numbered = re.match(r"(.*?\.)?\d+(?=\.)", name)
    return numbered[0] if numbered else name.rpartition(".")[0]


def _parts(weight: torch.nn.Parameter) -> Iterator[torch.Tensor]:
    """Yield the held parts of a weight: all of it or, under ZeRO-3, this rank's part, and also small weights whole."""
    shard = getattr(weight, "ds_tensor", None)
    if shard is None or weight.numel() == weight.ds_numel:
        yield weight.detach()
    if shard is not None and getattr(shard, "final_location", None) != "nvme":
        yield shard.detach()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


TENSORS, ELEMENTS = 256, 2**14
"""Size of the sample on each rank: number of tensors, and elements per tensor; at most 16 MiB in fp32."""

LEAST = 1e-12
"""Smaller changes are ignored: fp32 drops them in weights of 1e-2, but a zero, as in a new adapter, keeps them."""

Sample = dict[str, torch.Tensor]


def sample(model: PreTrainedModel) -> Sample:
    """Return a copy of some of the trained weights that this rank holds, in host memory."""
    held = {name: weight for name, weight in _held_weights(model).items() if weight.numel()}
    chosen = random.Random(0).sample(sorted(held), min(TENSORS, len(held)))
    return {name: _first_elements(held[name]) for name in chosen}


def moved(before: Sample, model: PreTrainedModel) -> bool:
    """Return whether any of the sampled weights has changed on this rank."""
    held = _held_weights(model)
    pairs = [(_first_elements(held[name]).float(), weight.float()) for name, weight in before.items() if name in held]
    return any(not (after - weight).abs().max() <= LEAST for after, weight in pairs)  # NaN counts as moved


def _held_weights(model: PreTrainedModel) -> Sample:
    """Return the trained weights in memory: with ZeRO-3 this rank's shards, except those on NVMe."""
    trained = ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
    held = {name: getattr(weight, "ds_tensor", weight) for name, weight in trained}
    return {name: part.detach() for name, part in held.items() if getattr(part, "final_location", None) != "nvme"}


def _first_elements(weight: torch.Tensor) -> torch.Tensor:
    return weight.flatten()[:ELEMENTS].to("cpu", copy=True)
