"""What `scripts/benchmark.py` has measured of the recipes on GPUs, read from `recipes/planning/measurements`."""

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.spec.pages import ROOT

FOLDER = ROOT / "recipes" / "planning" / "measurements"


@dataclass(frozen=True)
class Measured:
    """A recipe's fastest run on a GPU."""

    tokens_per_second: float
    """Without padding, per GPU."""
    peak_gib: float
    """Allocated, of the GPU's memory."""
    hardware: str
    date: str

    def __str__(self) -> str:
        return f"{self.peak_gib:.1f} GiB, {self.tokens_per_second:,.0f} tokens/s ({self.hardware}, {self.date})"


def results(folder: Path = FOLDER) -> dict[str, dict[str, Any]]:
    """Return every named benchmark's result on a GPU, by its name."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*_gpu.json"))]
    return {one["benchmark"]: one for one in found if "limits" in one and not one["draft"]}


def recipes(folder: Path = FOLDER) -> Mapping[str, Measured]:
    """Return the fastest run of each recipe that was measured, by its name (`llama3-8b-lora`)."""
    best: dict[str, Measured] = {}
    for result in results(folder).values():
        contenders = {case["label"] for case in result["cases"] if case["peer"] == "recipe"}
        for label in contenders & set(result["runs"]):
            runs = [run for run in result["runs"][label] if "error" not in run]
            if not runs:
                continue
            seconds = statistics.median(second for run in runs for second in run["step_seconds"])
            peak = max(run["peak_allocated_gib"] for run in runs)
            gpu = result["environment"]["gpus"][0].removeprefix("NVIDIA ")
            found = Measured(runs[0]["tokens_per_step"] / seconds, peak, gpu, result["date"])
            name = runs[0]["model"]
            if name not in best or found.tokens_per_second > best[name].tokens_per_second:
                best[name] = found
    return best
