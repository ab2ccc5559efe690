"""The results of `ds-recipes benchmark` on GPUs in `measurements/`: as a table, and each recipe's fastest run."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_recipes.benchmarks.cases import cells, completed_runs, tokens_per_second


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


def summary(names: Sequence[str], results: Mapping[str, dict[str, Any]]) -> str:
    """Return the README's table: a line per contender of every benchmark that was measured on a GPU."""
    lines = [
        "| benchmark | contender | tokens/s | of the first | MFU | peak GiB | reads per step | hardware, date |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        if name not in results:
            continue
        result = results[name]
        where = f"{result['environment']['gpus'][0]}, {result['date']}"
        if result.get("longest"):
            for label, (longest, _) in result["longest"].items():
                lines.append(f"| {name} | {label}: sequences of {longest:,} tokens |" + " |" * 5 + f" {where} |")
            continue
        for label, (speed, _, ratio, mfu, _, peak, _, reads) in cells(result).items():
            lines.append(f"| {name} | {label} | {speed} | {ratio} | {mfu} | {peak} | {reads} | {where} |")
    return "\n".join(lines) + "\n"
