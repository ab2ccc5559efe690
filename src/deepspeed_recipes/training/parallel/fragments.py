"""Maps each trained weight to the elements of the optimizer's tensors that hold it on this rank."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from torch import distributed as dist

from ...recipe.recipe import Layout
from .. import distributed, upstream
from ..holdings import layer_of
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


def layers(engine: Any) -> list[str]:
    """Return the layers of the whole model that have trained weights, in its order; a collective.

    `model.embed_tokens`, `model.layers.0`, ..., `model.norm`: the same names in every layout, with adapters too.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, list(dict.fromkeys(map(_layer, dict(_trained(engine))))))
    return list(dict.fromkeys(name for names in everyone for name in names))  # ranks are in the order of the stages


def by_tensor(engine: Any, layout: Layout) -> dict[int, list[Fragment]]:
    """Return the fragments in each tensor that the optimizer updates, by the tensor's `id`.

    Every element of the model is in the fragments of exactly `copies` ranks. Empty where the way in which DeepSpeed's
    optimizer holds the weights is not supported here: without ZeRO, in fp16.
    """
    found: dict[int, list[Fragment]] = {}
    for held, fragment in _fragments(engine, layout):
        found.setdefault(id(held), []).append(fragment)
    return found


def copies(engine: Any, layout: Layout) -> int:
    """Return how many ranks update the same elements: one with any kind of ZeRO, else all data-parallel ranks."""
    shared = any(hasattr(weight, "ds_tensor") or hasattr(weight, "_hp_mapping") for _, weight in _trained(engine))
    return 1 if shared else dist.get_world_size() // (layout.tensor * layout.pipeline)


def _fragments(engine: Any, layout: Layout) -> Iterator[tuple[torch.Tensor, Fragment]]:
    split = {weight for layer in tensor.layers(engine.module).values() for weight in layer.parameters()}
    counted_elsewhere = distributed.place(layout).tensor > 0
    whole = _whole(engine)
    for name, weight in _trained(engine):
        # As DeepSpeed counts for the gradient norm: weights that ranks or stages hold twice count once.
        if (counted_elsewhere and weight not in split) or getattr(weight, "ds_pipe_replicated", False):
            continue
        place = _sharded(engine, weight) if hasattr(weight, "ds_tensor") else _partitioned(engine, weight)
        if place is None:
            place = (whole[weight], 0, weight.numel()) if weight in whole else None
        if place and place[2]:
            yield place[0], Fragment(_layer(name), *place[1:])


def _sharded(engine: Any, weight: Any) -> tuple[torch.Tensor, int, int]:
    """Return the place of this rank's ZeRO-3 shard: the tensor, the first element and the number of elements."""
    group, start, size = engine.optimizer.grad_position[engine.optimizer.get_param_id(weight)]
    left = weight.ds_numel - upstream.rank_of_shard(weight) * size  # the last shard is padded
    return engine.optimizer.fp32_partitioned_groups_flat[group], start, max(0, min(size, left))


def _partitioned(engine: Any, weight: Any) -> tuple[torch.Tensor, int, int] | None:
    """Return the same for ZeRO 1 and 2, whose partitions cut through weights, or None for a weight of other ranks."""
    mapping = getattr(weight, "_hp_mapping", None)
    if mapping is None:
        return None
    of_zero = getattr(engine.optimizer, "single_partition_of_fp32_groups", None)
    partitions = engine.optimizer.fp32_groups_flat_partition if of_zero is None else of_zero
    address = mapping.get_hp_fragment_address()
    return partitions[mapping.param_group_index], address.start, address.numel


def _whole(engine: Any) -> dict[Any, torch.Tensor]:
    """Return the tensor that the optimizer updates for each weight without ZeRO: the weight, or its copy in fp32."""
    optimizer = engine.optimizer
    if optimizer is engine.basic_optimizer:
        return {weight: weight for _, weight in _trained(engine)}
    if engine.bfloat16_enabled() and hasattr(optimizer, "fp32_groups"):
        pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        return {weight: copy for group, held in pairs for weight, copy in zip(group, held, strict=True)}
    return {}


def _trained(engine: Any) -> Iterator[tuple[str, Any]]:
    """Yield the trained weights of this rank, by their names in the unsplit model."""
    module = engine.module
    model = stage(module).model if isinstance(module, PipelineModule) else module
    return ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)


def _layer(name: str) -> str:
    return layer_of(name.removeprefix(PEFT))
