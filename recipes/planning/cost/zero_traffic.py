"""Bytes that ZeRO and data parallelism send in a step, by kind of collective, to be compared with a profile."""

from collections.abc import Mapping
from typing import Any

REUSE_DISTANCE = 1_000_000_000
"""`stage3_max_reuse_distance`, DeepSpeed's default: weights that are needed again within so many elements are kept."""


def zero_traffic(
    stage: int, total: int, trained: int, weight_bytes: int, micro_batches: int, reuse: int = REUSE_DISTANCE
) -> dict[str, int]:
    """Return the bytes of a step's messages, whole, by kind; each counts what an all-gather leaves on each rank.

    Args:
        stage: of ZeRO.
        total: parameters of the model.
        trained: of these.
        weight_bytes: of one in the training precision, in which gradients travel too.
        micro_batches: per step and rank.
        reuse: `stage3_max_reuse_distance`.

    Small weights that ZeRO-3 keeps on every rank, and norms, are not in it: below 1 %.
    """
    gradients, weights = trained * weight_bytes, total * weight_bytes
    if stage == 0:
        return {"all-reduce": gradients}
    if stage < 3:
        # Gradients are averaged by all-reduces; at stage 1 once, after the last micro-batch.
        return {"all-reduce": gradients * (micro_batches if stage == 2 else 1), "all-gather": gradients}
    # The backward pass meets the last weights of the forward pass first: those half a reuse distance from the end are
    # still there, and only the others are gathered again.
    again = max(0, total - reuse // 2) * weight_bytes
    return {"all-gather": (weights + again) * micro_batches, "reduce-scatter": gradients * micro_batches}


def of_run(about: Mapping[str, Any]) -> dict[str, int]:
    """Return the same for a run, from what its trace says of it; empty where layers or stages are split as well."""
    layout = about.get("layout", {})
    if any(layout.get(kind, 1) > 1 for kind in ("tensor", "pipeline", "expert")) or about.get("partition_size", 1) > 1:
        return {}
    if about.get("world_size", 1) == 1:
        return {}
    return zero_traffic(
        about["stage"],
        about["total"],
        about["trained"],
        about["weight_bytes"],
        about["micro_batches"],
        about.get("reuse_distance", REUSE_DISTANCE),
    )
