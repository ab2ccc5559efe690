"""A benchmark's numbers as a table. Standard library only."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..recipe.gpus import peak_flops

COLUMNS = (
    "tokens/s", "spread", "of the first", "MFU", "of this machine's matrix product", "peak GiB", "reserved GiB",
    "reads per step",
)  # fmt: skip


def table(result: dict[str, Any]) -> str:
    """Return a benchmark's results as Markdown: medians over all timed steps of all runs, or the error.

    `spread` is half of the range from the 10th to the 90th percentile of the steps, as a share of the median. Columns
    without measurements are left out.
    """
    if result.get("longest"):
        lines = ["| | longest sequence that trained, tokens | next length |", "|---|---|---|"]
        return "\n".join([*lines, *(f"| {name} | {n or ''} | {why} |" for name, (n, why) in result["longest"].items())])
    measured = cells(result)
    rows: list[list[str]] = []
    for name, runs in result["runs"].items():
        why = runs[0].get("error", "") if runs else "not reached"
        rows.append([name, *measured.get(name, [*[""] * (len(COLUMNS) - 1), why])])
    return markdown(["", *COLUMNS], rows)


def completed_runs(result: Mapping[str, Any], label: str) -> list[dict[str, Any]]:
    """Return a contender's runs that ended without an error."""
    return [run for run in result["runs"].get(label, []) if "error" not in run]


def tokens_per_second(runs: Sequence[Mapping[str, Any]]) -> float:
    """Return a contender's tokens per second and GPU, from the median of all steps of its runs."""
    return runs[0]["tokens_per_step"] / statistics.median(second for run in runs for second in run["step_seconds"])


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table without its empty columns."""
    filled = [number for number in range(len(head)) if any(row[number] for row in rows)]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line[number] for number in filled) + " |" for line in lines)


def cells(result: dict[str, Any]) -> dict[str, list[str]]:
    """Return the cells of each contender with completed runs, in the order of `COLUMNS`; unmeasured cells are empty."""
    rows: dict[str, list[str]] = {}
    first = None
    for name in result["runs"]:
        if not (ended := completed_runs(result, name)):
            continue
        steps = [seconds for run in ended for seconds in run["step_seconds"]]
        tokens = tokens_per_second(ended)
        first = first or tokens
        flops = ended[0]["flops_per_step"] / statistics.median(steps)
        rows[name] = [
            f"{tokens:,.0f}", f"{_spread(steps):.1%}", f"{tokens / first:.3f}",
            _share(flops, _peak(result)), _share(flops, result["limits"].get("matrix_flops")),
            _memory(ended, "peak_allocated_gib"), _memory(ended, "peak_reserved_gib"),
            f"{max(run['reads_per_step'] for run in ended)}",
        ]  # fmt: skip
    return rows


def heading(result: dict[str, Any]) -> str:
    """Return a line with the benchmark, the hardware, the date and the versions."""
    where = ", ".join(result["environment"]["gpus"]) or f"{result['environment']['cpu_count']} CPU cores"
    packages = result["environment"]["packages"]
    kind = "DRAFT on shrunken models, no measure of speed: " if result["draft"] else ""
    return (
        f"{kind}{result['benchmark']} ({result['about']}), {where}, {result['date']}, "
        f"torch {packages['torch']}, deepspeed {packages['deepspeed']}, transformers {packages['transformers']}"
    )


def _spread(steps: Sequence[float]) -> float:
    low, high = (statistics.quantiles(steps, n=10)[index] for index in (0, -1))
    return (high - low) / 2 / statistics.median(steps)


def _peak(result: dict[str, Any]) -> float | None:
    gpus = result["environment"]["gpus"]
    return peak_flops(gpus[0]) if gpus else None


def _share(value: float, of: float | None) -> str:
    return f"{value / of:.1%}" if of else ""


def _memory(runs: Sequence[dict[str, Any]], key: str, best: Callable[..., float] = max) -> str:
    known = [run[key] for run in runs if key in run]
    return f"{best(known):.1f}" if known else ""
