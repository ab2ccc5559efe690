"""Fit the constants of `measurements/constants.json` on published tables, and report on the others.

python -m recipes.planning.calibrate            # fit, write, report
python -m recipes.planning.calibrate --report   # report only
"""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from recipes.planning.constants import FILE, resolve
from recipes.planning.tables import Run, runs
from recipes.planning.time import step

Place = tuple[str, ...]
"""Of a constant in `constants.json`: the keys that lead to it."""


def _values(*keys: str, **limits: tuple[float, float]) -> dict[Place, tuple[float, float]]:
    return {(*keys, "values", name): bounds for name, bounds in limits.items()}


FITTED: dict[Place, tuple[float, float]] = {
    **_values("common", latency=(1e-6, 3e-3), turn=(1e-4, 0.02)),
    **_values("gpus", "A100", matmul=(0.5, 0.95), attention=(0.1, 0.8), waves=(0.1, 3)),
    **_values("gpus", "H100", matmul=(0.4, 0.95), attention=(0.1, 0.8), waves=(0.1, 3)),
    **_values("software", "llm-foundry", passes=(0.5, 8), overlap=(0, 1), network=(0.2, 0.95)),
    **_values(
        "software", "megatron-deepspeed", passes=(0.5, 8), scores=(4, 60), unaligned=(0.4, 1), network=(0.05, 0.95)
    ),
}
"""What is fitted on the published tables, and within which limits."""
OURS = _values("software", "deepspeed", passes=(0.5, 8), launch=(1e-5, 1e-2))
"""What is fitted on this project's own measurements, once there are some."""


def predicted(run: Run, data: Mapping[str, Any]) -> float:
    """Return tokens per second and GPU."""
    constants = resolve(data, run.cluster.gpu.name, run.software)
    return step(run.anatomy, run.setup, run.cluster, constants).tokens_per_second_per_gpu


@dataclass(frozen=True)
class Score:
    """How predictions compare with measurements."""

    rows: int
    error: float
    """Mean of |predicted / measured - 1|."""
    worst: float
    rank: float
    """Spearman's rank correlation."""


def score(pairs: Sequence[tuple[float, float]]) -> Score:
    """Return how well predictions agree with measurements, pair by pair."""
    errors = [abs(guess / truth - 1) for guess, truth in pairs]
    guesses, truths = zip(*pairs, strict=True)
    return Score(len(pairs), sum(errors) / len(errors), max(errors), correlation(_ranks(guesses), _ranks(truths)))


def _ranks(values: Sequence[float]) -> list[float]:
    """Return each value's place, the mean one where several are equal."""
    return [sum(other < value for other in values) + sum(other == value for other in values) / 2 for value in values]


def correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Return Pearson's correlation."""
    middle = sum(left) / len(left), sum(right) / len(right)
    pairs = [(one - middle[0], other - middle[1]) for one, other in zip(left, right, strict=True)]
    spread = math.sqrt(sum(one**2 for one, _ in pairs) * sum(other**2 for _, other in pairs))
    return sum(one * other for one, other in pairs) / spread


def loss(rows: Sequence[Run], data: Mapping[str, Any]) -> float:
    """Return the mean of |log(predicted / measured)|, every table counting the same."""
    tables: dict[str, list[float]] = {}
    for run in rows:
        error = abs(math.log(predicted(run, data) / run.tokens_per_second_per_gpu))
        tables.setdefault(run.table, []).append(error)
    return sum(sum(errors) / len(errors) for errors in tables.values()) / len(tables)


def fit(data: dict, limits: Mapping[Place, tuple[float, float]], of: Callable[[dict], float]) -> float:
    """Change the constants of `data` at the places of `limits` so that the loss is least, and return that.

    One after the other, in ever smaller steps; then again from large ones, since they depend on each other.
    """
    best = of(data)
    for _ in range(2):
        width = 0.4
        while width > 0.005:
            start = best
            for place, bounds in limits.items():
                best = _better(data, place, bounds, width, of, best)
            if best == start:
                width /= 2
    return best


def _better(
    data: dict, place: Place, bounds: tuple[float, float], width: float, of: Callable[[dict], float], best: float
) -> float:
    """Move one constant up or down by `width` as long as that helps, and return the loss."""
    *keys, name = place
    values = data
    for key in keys:
        values = values[key]
    for factor in (1 + width, 1 / (1 + width)):
        while True:
            old = values[name]
            values[name] = float(f"{min(bounds[1], max(bounds[0], old * factor)):.3g}")
            now = of(data)
            if now >= best:
                values[name] = old
                break
            best = now
    return best


def report(data: Mapping[str, Any]) -> str:
    """Return a table: how well each published table is predicted, and all together that were not fitted on."""
    pairs: dict[tuple[bool, str], list[tuple[float, float]]] = {}
    for run in runs():
        pairs.setdefault((run.fitted, run.table), []).append((predicted(run, data), run.tokens_per_second_per_gpu))
    held_out = [pair for (fitted, _), each in pairs.items() if not fitted for pair in each]
    lines = ["| table | used to | rows | mean error | worst | rank correlation |", "|---|---|---|---|---|---|"]
    for (fitted, table), each in sorted({**pairs, (False, "all that nothing was fitted on"): held_out}.items()):
        result = score(each)
        lines.append(
            f"| {table} | {'fit' if fitted else 'judge'} | {result.rows} | {result.error:.1%} | {result.worst:.1%} "
            f"| {result.rank:.3f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Fit unless told not to, and print the report."""
    data = json.loads(FILE.read_text())
    if "--report" not in arguments:
        published = [run for run in runs() if run.fitted and run.software != "deepspeed"]
        own = [run for run in runs() if run.software == "deepspeed"]
        print(f"{len(published)} rows: {fit(data, FITTED, lambda changed: loss(published, changed)):.4f}")
        if own:
            print(f"{len(own)} of ours: {fit(data, OURS, lambda changed: loss(own, changed)):.4f}")
        data["date"] = date.today().isoformat()
        FILE.write_text(json.dumps(data, indent=2) + "\n")
    print(report(data))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
