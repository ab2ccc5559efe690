"""Finds the optimizer's parameter groups whose gradients are not finite."""

from collections.abc import Iterator
from typing import Any

import torch


def not_finite(engine: Any) -> list[str]:
    """Return the names of those groups among the gradients that this rank holds.

    Must be called before DeepSpeed discards the gradients (`upstream.before_refused_updates`).
    """
    return [_name(engine, index) for index in sorted(set(_bad_groups(engine.optimizer)))]


def _bad_groups(optimizer: Any) -> Iterator[int]:
    sub_groups = getattr(optimizer, "sub_group_to_group_id", {})  # ZeRO-3 cuts groups into smaller ones
    flat = getattr(optimizer, "single_partition_of_fp32_groups", None)
    flat = getattr(optimizer, "fp32_partitioned_groups_flat", []) if flat is None else flat
    for index in range(len(flat)):
        held = optimizer.averaged_gradients.get(index) or [flat[index].grad]  # the latter under offload
        if any(gradient is not None and not torch.isfinite(gradient).all() for gradient in held):
            yield sub_groups.get(index, index)


def _name(engine: Any, index: int) -> str:
    """Return `group 0 (model.embed_tokens.weight and 14 more)`."""
    groups = engine.optimizer.optimizer.param_groups
    names = [name for name, parameter in engine.module.named_parameters() if parameter in _members(engine, index)]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"group {index} of {len(groups)} ({names[0]}{more})" if names else f"group {index} of {len(groups)}"


def _members(engine: Any, index: int) -> set[Any]:
    optimizer = engine.optimizer
    if hasattr(optimizer, "bit16_groups"):
        return set(optimizer.bit16_groups[index])
    ids = optimizer.sub_group_to_group_id
    return {one for sub, group in enumerate(optimizer.fp16_groups) if ids[sub] == index for one in group}
