"""Fits the constants of the time estimate to measured throughput, and reports the error on held-out tables.

The constants of the hardware and of other software are fitted on two tables first, then those of this project's
software on the fitted share of the published rows and on the project's own runs. The report covers every share.

python -m scripts.maintain.calibration.calibrate            # fit, write, report
python -m scripts.maintain.calibration.calibrate --report   # report only
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from deepspeed_recipes.planning.cost.constants import COUNTS, FILE, Constants, constants, resolve
from deepspeed_recipes.planning.cost.step_time import step_time
from deepspeed_recipes.recipe import files

from . import published_errors, ranges
from .measured_runs import MeasuredRun, runs
from .published_models import profile_of
from .published_rows import PublishedRow, published_rows

OTHERS = Path(__file__).with_name("other_software.json")
"""The constants of published tables' software, which the planner does not need."""
ConstantPath = tuple[str, ...]
"""The keys of a constant in the result of `read`, from the top."""


def _limits(*keys: str, **limits: tuple[float, float]) -> dict[ConstantPath, tuple[float, float]]:
    return {(*keys, "values", name): bounds for name, bounds in limits.items()}


PUBLISHED: dict[ConstantPath, tuple[float, float]] = {
    **_limits("common", latency=(1e-6, 1e-3)),
    **_limits("gpus", "A100", matmul=(0.5, 0.95), waves=(0.1, 3)),
    **_limits("gpus", "H100", matmul=(0.4, 0.95), waves=(0.1, 3)),
    **_limits("others", "llm-foundry", passes=(0.5, 8), gap=(1e-6, 1e-2), overlap=(0, 1), network=(0.2, 0.95)),
    ("others", "llm-foundry", "attention", "A100"): (0.1, 0.8),
    ("others", "llm-foundry", "attention", "H100"): (0.1, 0.8),
    **_limits("others", "megatron-deepspeed", passes=(0.5, 8), gap=(1e-6, 1e-2), network=(0.05, 0.95)),
    **_limits("others", "megatron-deepspeed", scores=(4, 60), unaligned=(0.4, 1)),
}
"""Constants that are fitted on the published tables, with their limits."""
OWN: dict[ConstantPath, tuple[float, float]] = {
    **_limits("common", gap=(1e-6, 1e-3), launch=(2e-6, 3e-5), overlap=(1e-3, 1)),
    **_limits("common", hook=(1e-4, 2e-3), waiting=(1e-3, 1)),
    **_limits("gpus", "RTX 30", matmul=(0.5, 1.0), peer=(0.02, 0.75)),
    **_limits("gpus", "RTX 40", matmul=(0.5, 1.0)),
    **_limits("gpus", "RTX PRO", matmul=(0.5, 1.0), peer=(0.02, 0.75)),
    **_limits("gpus", "B300", matmul=(0.5, 0.95), waves=(0.1, 3)),
}
"""Constants that are fitted on the fitted share of the published rows and on the project's own measurements."""
TAKEN = {"network": "llm-foundry", "unaligned": "megatron-deepspeed"}
"""Constants of this project that were fitted for other software alone."""


def read() -> dict[str, Any]:
    """Return the content of `constants.json`, with the constants of published tables' software as `others`."""
    return {**json.loads(FILE.read_text(encoding="utf-8")), "others": json.loads(OTHERS.read_text(encoding="utf-8"))}


def constants_of(run: MeasuredRun, data: Mapping[str, Any]) -> Constants:
    """Return the constants of a run's GPU and software; other software used one kernel, as fast at every length."""
    own = resolve(data, run.cluster.gpu.name)
    if run.software == "deepspeed":
        return own
    other = data["others"][run.software]
    share = other.get("attention", {}).get(run.cluster.gpu.name.split()[0], 1.0)  # unfused attention does not read it
    share *= 1 + COUNTS.half_speed / run.setup.sequence_length
    return replace(own, **other["values"], kernels={"flash_2": (share, share)})


def predicted(run: MeasuredRun, data: Mapping[str, Any]) -> float:
    """Return the predicted tokens per second and GPU."""
    return step_time(run.profile, run.setup, run.cluster, constants_of(run, data)).tokens_per_second_per_gpu


@dataclass(frozen=True)
class Score:
    """Errors of predictions compared with measurements."""

    count: int
    error: float
    """Mean of |predicted / measured - 1|."""
    worst: float
    rank: float
    """Spearman's rank correlation."""


def score(pairs: Sequence[tuple[float, float]]) -> Score:
    """Return the errors of (prediction, measurement) pairs."""
    errors = [abs(guess / truth - 1) for guess, truth in pairs]
    guesses, truths = zip(*pairs, strict=True)
    return Score(len(pairs), sum(errors) / len(errors), max(errors), published_errors.rank_correlation(guesses, truths))


def loss(measured: Sequence[MeasuredRun], data: Mapping[str, Any]) -> float:
    """Return the mean of |log(predicted / measured)|, with equal weight for every table."""
    tables: dict[str, list[float]] = {}
    for run in measured:
        error = abs(math.log(predicted(run, data) / run.tokens_per_second_per_gpu))
        tables.setdefault(run.table, []).append(error)
    return sum(sum(errors) / len(errors) for errors in tables.values()) / len(tables)


def row_loss(measured: Sequence[MeasuredRun], data: Mapping[str, Any]) -> float:
    """Return the mean of |predicted / measured - 1| over all rows, as in the report.

    Rows count equally, because some tables have only two. In leave-one-publisher-out tests, this loss predicts the
    publisher's rows better than logarithms or equal weights for publishers do (9.8 % instead of 10.4 to 11.2 %, 137
    rows of the fitted share).
    """
    return score([(predicted(run, data), run.tokens_per_second_per_gpu) for run in measured]).error


def fit(data: dict, limits: Mapping[ConstantPath, tuple[float, float]], of: Callable[[dict], float]) -> float:
    """Minimise the loss by changing the constants in `data` that `limits` names, and return the minimum.

    This is pattern search (Hooke and Jeeves 1961, doi:10.1145/321062.321069): each constant is tried one step up and
    down, then all move together in the direction that helped. If nothing helps, the steps get smaller.
    """

    def at(point: Sequence[float]) -> float:
        for (*keys, name), (least, most), value in zip(limits, limits.values(), point, strict=True):
            _entry(data, keys)[name] = float(f"{min(most, max(least, value)):.3g}")
        return of(data)

    point = [_entry(data, keys)[name] for *keys, name in limits]
    best, width = at(point), 0.4
    while width > 0.005:
        moved, less = _explore(point, best, width, at)
        if less >= best:
            width /= 2
        while less < best:
            further = [there**2 / here for here, there in zip(point, moved, strict=True)]
            point, best = moved, less
            moved, less = _explore(further, at(further), width, at)
    at(point)
    return best


def _entry(data: dict, keys: Sequence[str]) -> dict:
    for key in keys:
        data = data[key]
    return data


def _explore(
    point: Sequence[float], best: float, width: float, at: Callable[[Sequence[float]], float]
) -> tuple[list[float], float]:
    """Return the point with each constant multiplied or divided by 1 + `width` if that helps, and the point's loss."""
    point = list(point)
    for index, value in enumerate(point):
        for other in (value * (1 + width), value / (1 + width)):
            point[index] = other
            if (loss := at(point)) < best:
                best = loss
                break
            point[index] = value
    return point, best


def published_runs(rows: Iterable[PublishedRow]) -> list[MeasuredRun]:
    """Return the rows with a speed and a prediction, as runs of this project's software, as users' plans are."""
    return [
        MeasuredRun(
            one.row.table,
            one.row.share == "fitted",
            "deepspeed",
            profile_of(one.row),
            one.row.setup,
            one.row.cluster,
            one.measured,
        )
        for one in published_errors.comparisons(rows, "time")
    ]


def report(data: Mapping[str, Any]) -> str:
    """Return the errors on each measured table, and on all held-out tables together, as a Markdown table."""
    pairs: dict[tuple[bool, str], list[tuple[float, float]]] = {}
    for run in runs():
        pairs.setdefault((run.fitted, run.table), []).append((predicted(run, data), run.tokens_per_second_per_gpu))
    held_out = [pair for (fitted, _), each in pairs.items() if not fitted for pair in each]
    lines = ["| table | used to | rows | mean error | worst | rank correlation |", "|---|---|---|---|---|---|"]
    for (fitted, table), each in sorted({**pairs, (False, "all held-out tables"): held_out}.items()):
        result = score(each)
        lines.append(
            f"| {table} | {'fit' if fitted else 'judge'} | {result.count} | {result.error:.1%} | {result.worst:.1%} "
            f"| {result.rank:.3f} |"
        )
    return "\n".join(lines)


def _write(data: Mapping[str, Any]) -> None:
    """Write the constants, and use them for all further predictions."""
    own = {name: value for name, value in data.items() if name != "others"}
    for file, content in ((FILE, own), (OTHERS, data["others"])):
        files.write_text(file, json.dumps(content, indent=2) + "\n")
    constants.cache_clear()


def main(arguments: Sequence[str]) -> int:
    """Fit the constants unless `--report` is given, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="only report the errors; change nothing")
    report_only = parser.parse_args(arguments).report
    data = read()
    if not report_only:
        published = [run for run in runs() if run.fitted and run.software != "deepspeed"]
        own = [run for run in runs() if run.fitted and run.software == "deepspeed"]
        # Only on GPUs whose own constants are measured, so that the software's do not make up for a data sheet's.
        rows = [row for row in published_rows() if row.share == "fitted" and row.is_same_stack and row.known_gpu]
        own += published_runs(row for row in rows if constants(row.cluster.gpu.name).measured)
        print(f"{len(published)} rows: {fit(data, PUBLISHED, lambda changed: loss(published, changed)):.4f}")
        for name, software in TAKEN.items():
            data["common"]["values"][name] = data["others"][software]["values"][name]
        print(f"{len(own)} rows: {fit(data, OWN, lambda changed: row_loss(own, changed)):.4f}")
        data["date"] = date.today().isoformat()
        _write(data)
        data["ranges"] = ranges.fit(published_rows())
        _write(data)
    rows = published_rows()
    print(report(data), published_errors.report(rows), ranges.coverage(rows, data), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
