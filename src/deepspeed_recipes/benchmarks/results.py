"""Reads the results of `ds-recipes benchmark` on GPUs from `measurements/`, and finds each recipe's fastest run."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class MeasuredRecipe:
    """A recipe's fastest run on a GPU."""

    tokens_per_second: float
    """Tokens without padding, per GPU."""
    peak_gib: float
    """Peak of the allocated GPU memory."""
    hardware: str
    date: str

    def __str__(self) -> str:
        return f"{self.peak_gib:.1f} GiB, {self.tokens_per_second:,.0f} tokens/s ({self.hardware}, {self.date})"


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the result of every benchmark that ran on a GPU, by its name."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*_gpu.json"))]
    return {one["benchmark"]: one for one in found if "limits" in one and not one["draft"]}


def completed_runs(result: Mapping[str, Any], label: str) -> list[dict[str, Any]]:
    """Return a contender's runs that ended without an error."""
    return [run for run in result["runs"].get(label, []) if "error" not in run]


def tokens_per_second(runs: Sequence[Mapping[str, Any]]) -> float:
    """Return a contender's tokens per second and GPU, from the median of all steps of its runs."""
    return runs[0]["tokens_per_step"] / statistics.median(second for run in runs for second in run["step_seconds"])


def measured_recipes(folder: Path) -> Mapping[str, MeasuredRecipe]:
    """Return the fastest run of each recipe that was measured, by its name (`llama3-8b-lora`)."""
    best: dict[str, MeasuredRecipe] = {}
    for result in results(folder).values():
        contenders = {case["label"] for case in result["cases"] if case["peer"] == "recipe"}
        for label in contenders:
            runs = completed_runs(result, label)
            if not runs:
                continue
            peak = max(run["peak_allocated_gib"] for run in runs)
            gpu = result["environment"]["gpus"][0].removeprefix("NVIDIA ")
            found = MeasuredRecipe(tokens_per_second(runs), peak, gpu, result["date"])
            name = runs[0]["model"]
            if name not in best or found.tokens_per_second > best[name].tokens_per_second:
                best[name] = found
    return best
