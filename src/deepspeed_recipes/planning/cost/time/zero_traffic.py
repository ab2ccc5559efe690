"""Bytes that ZeRO and data parallelism send in a step, by kind of collective, for comparison with a profile."""

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
    """Return the bytes of a step's whole messages by kind, such as the output of an all-gather on each rank.

    Small weights that ZeRO-3 keeps on every rank, and norms, are not included: below 1 %.

    Args:
        stage: ZeRO stage.
        total: number of the model's parameters that the ranks hold together.
        trained: number of trained parameters among them.
        weight_bytes: bytes of a parameter in the training precision, which is also that of gradients.
        micro_batches: number per step and rank.
        kept: weights that ZeRO-3 keeps whole from the forward to the backward pass, `DeepSpeedFile.kept_weights`.
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
    """Return the same by kind and process group for a run, from the `about` of its trace.

    Empty if stages or experts are split. Activations that tensor parallelism sends are not included, since they depend
    on the sequence lengths.
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
        # Except for the first gather after an update, all weights are in the second copy that these ranks share.
        far = held["total"] * weight_bytes
        first = rank // near * near
        found["all-gather", group] = far
        found["all-gather", tuple(range(first, first + near))] = sent["all-gather"] - far
    return {key: size for key, size in found.items() if size}


def _replicas(layout: Layout, rank: int, world_size: int) -> Group:
    """Return the ranks that hold the same part of the model as `rank`, over which ZeRO shards it."""

    def part(one: int) -> Any:
        return replace(rank_position(layout, one, world_size), data=0, sequence=0)

    return tuple(one for one in range(world_size) if part(one) == part(rank))
