"""Corrects predicted speeds by past runs on this machine."""

import statistics
from pathlib import Path

from ...recipe.errors import UserError
from ...recipe.run_folder import RunFolder, read_json, read_jsonl
from ..cost.training_setup import TrainingSetup
from ..hardware.cluster import Cluster, Correction

RUNS = Path("runs")
"""The folder in which the launcher keeps runs by default."""
NEWEST = 50
"""Number of runs that are read, the newest ones."""


def kind_of(setup: TrainingSetup) -> str:
    """Return the kind of a run: runs of one kind are predicted too fast or too slow by similar factors."""
    method = "full" if setup.lora is None else "qlora" if setup.quantized else "lora"
    sharded = f"ZeRO-{setup.zero_stage}" if setup.zero_stage == 3 else "ZeRO-0 to 2"
    layout = [f"{name} {size}" for name, size in vars(setup.layout).items() if size > 1]
    offload = [] if setup.offload_optimizer == "none" else [f"optimizer on {setup.offload_optimizer}"]
    return ", ".join([method, sharded, *layout, *offload])


def corrections(cluster: Cluster, runs: Path = RUNS) -> dict[str, Correction]:
    """Return the median of measured / predicted by kind, over finished runs on GPUs and rates like the cluster's.

    Args:
        cluster: where the plan is for; its corrections do not matter.
        runs: the folder with the run folders, `RECIPE/TIME`; a run that cannot be read does not count.
    """
    found: dict[str, list[float]] = {}
    rates = rates_of(cluster)
    for file in sorted(runs.glob("*/*/summary.json"), key=lambda file: file.parent.name)[-NEWEST:]:
        try:
            summary = read_json(file)
            predicted, measured = summary.get("predicted") or {}, summary.get("measured") or {}
            if predicted.get("rates") == rates and measured.get("steady_tokens_per_second"):
                ratio = measured["steady_tokens_per_second"] / predicted["uncorrected_tokens_per_second"]
                found.setdefault(predicted["kind"], []).append(ratio)
        except (UserError, OSError, AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError):
            continue  # cut off, or by hand
    return {kind: Correction(statistics.median(ratios), len(ratios)) for kind, ratios in found.items()}


def rates_of(cluster: Cluster) -> str:
    """Return the GPU and where its rates are from; predictions by other rates are corrected by other factors."""
    source = f"measured on {cluster.machine.date}" if cluster.machine else "datasheet"
    return f"{cluster.gpu.name}, {source}"


def steady_speed(run: RunFolder) -> float | None:
    """Return the median tokens per second after the first logged step, which compiles kernels and fills caches."""
    speeds = [row["tokens_per_second"] for row in read_jsonl(run.metrics) if row.get("tokens_per_second")]
    return statistics.median(speeds[1:]) if len(speeds) > 1 else None
