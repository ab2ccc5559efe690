"""Bytes that ZeRO and data parallelism send in a step, by kind of collective, to be compared with a profile."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from ....recipe.deepspeed_file import KEPT_WEIGHTS
from ....recipe.layout import rank_position
from ....recipe.recipe import Layout

Group: TypeAlias = tuple[int, ...]
"""The ranks that communicate, in order."""


def zero_traffic(
    stage: int, total: int, trained: int, weight_bytes: int, micro_batches: int, kept: int = KEPT_WEIGHTS
) -> dict[str, int]:
    """Return the bytes of a step's messages, whole, by kind; each counts what an all-gather leaves on each rank.

    Args:
        stage: of ZeRO.
        total: parameters of the model that the ranks have between them.
        trained: of these.
        weight_bytes: of one in the training precision, in which gradients travel too.
        micro_batches: per step and rank.
        kept: weights that ZeRO-3 keeps whole from the forward to the backward pass, `DeepSpeedFile.kept_weights`.

    Small weights that ZeRO-3 keeps on every rank, and norms, are not in it: below 1 %.
    """
    gradients = trained * weight_bytes
    if stage == 0:
        return {"all-reduce": gradients}
    if stage < 3:
        # Gradients are averaged by all-reduces; at stage 1 once, after the last micro-batch.
        return {"all-reduce": gradients * (micro_batches if stage == 2 else 1), "all-gather": gradients}
    gathered = (total + max(0, total - kept)) * weight_bytes * micro_batches
    return {"all-gather": gathered, "reduce-scatter": gradients * micro_batches}


def of_run(about: Mapping[str, Any]) -> dict[tuple[str, Group], int]:
    """Return the same by kind and process group for a run, from what its trace says of it.

    Empty where stages or experts are apart. What tensor parallelism sends of activations is not in it: it depends on
    the sequences' lengths.
    """
    layout, rank = Layout(**about.get("layout", {})), about.get("rank", 0)
    world_size = about.get("world_size", 1)
    group = _replicas(layout, rank, world_size)
    if len(group) == 1 or layout.pipeline > 1 or layout.expert > 1:
        return {}
    held, weight_bytes, micro_batches = about["held"], about["weight_bytes"], about["micro_batches"]
    sent = zero_traffic(
        about["stage"],
        held["total"],
        held["trained"],
        weight_bytes,
        micro_batches,
        about.get("kept_weights", KEPT_WEIGHTS),
    )
    found = {(kind, group): size for kind, size in sent.items()}
    near = about.get("partition_size", 1)
    if about["stage"] == 3 and 1 < near < len(group):
        # Every gather but the first after an update finds all weights among the ranks that share the second copy.
        far = held["total"] * weight_bytes
        first = rank // near * near
        found["all-gather", group] = far
        found["all-gather", tuple(range(first, first + near))] = sent["all-gather"] - far
    return {key: size for key, size in found.items() if size}


def _replicas(layout: Layout, rank: int, world_size: int) -> Group:
    """Return the ranks that hold the same part of the model as `rank`, between which ZeRO divides it."""

    def part(one: int) -> Any:
        return replace(rank_position(layout, one, world_size), data=0, sequence=0)

    return tuple(one for one in range(world_size) if part(one) == part(rank))
