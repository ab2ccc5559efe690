"""Reports the planner's errors on published rows, by share: `python -m ...calibration.published_errors`.

Each row is planned with the settings from its source and the constants of this project's own software, as a user's plan
would be. Nothing is fitted here.
"""

import contextlib
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from deepspeed_recipes.planning.cost.constants import constants
from deepspeed_recipes.planning.cost.memory import Memory, peak_memory
from deepspeed_recipes.planning.cost.step_time import step_time
from deepspeed_recipes.recipe.errors import UserError

from .published_models import profile_of
from .published_rows import SHARES, PublishedRow, published_rows

WITHIN = 0.15
"""The report has a column with the share of rows whose error is at most this."""

Measure = Literal["memory", "time"]
KINDS: Mapping[str, Callable[[PublishedRow], str]] = {
    "all": lambda row: "all rows",
    "method": lambda row: row.method,
    "stack": lambda row: stack(row),
    "layout": lambda row: layout(row),
    "constants": lambda row: f"{'of' if constants(row.cluster.gpu.name).measured else 'borrowed for'} the GPU",
    "table": lambda row: row.table,
}
"""Criteria by which the report groups the rows."""


@dataclass(frozen=True)
class Comparison:
    """The predicted and the measured value of a row, in GiB or in tokens per second and GPU."""

    row: PublishedRow
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Predicted / measured - 1; positive if the prediction is too high."""
        return self.predicted / self.measured - 1


def stack(row: PublishedRow) -> str:
    """Return the software; for transformers' layers, also whether DeepSpeed, as here, or FSDP shards them."""
    if not row.is_same_stack:
        return row.stack
    return "Hugging Face with DeepSpeed, or on one GPU" if row.runs_as_here else "Hugging Face with FSDP"


def layout(row: PublishedRow) -> str:
    """Return the dimensions that are split in addition to data, or otherwise how the states are placed."""
    sizes = {"tensor": row.tensor, "pipeline": row.pipeline, "sequence": row.sequence, "expert": row.expert}
    split = "+".join(name for name, size in sizes.items() if size > 1)
    if split:
        return split
    place = "one GPU" if row.gpus == 1 else "sharded" if row.sharding in ("zero3", "fsdp") else "copies"
    return place if row.offload == "none" else f"{place}, offloaded"


@cache
def planned_memory(row: PublishedRow) -> Memory:
    """Return the predicted memory of a row's run."""
    return peak_memory(profile_of(row), row.setup, row.cluster)


def predicted_gib(row: PublishedRow) -> float:
    """Return the prediction to compare with a row's memory, which is the whole device's unless stated otherwise."""
    planned = planned_memory(row)
    left = {"allocated": ("runtime", "fragmentation"), "reserved": ("runtime",)}.get(row.memory_is, ())
    return (planned.gpu - sum(planned.components[name] for name in left)) / 2**30


def predicted_speed(row: PublishedRow) -> float:
    """Return the predicted tokens per second and GPU."""
    return step_time(profile_of(row), row.setup, row.cluster).tokens_per_second_per_gpu


def comparisons(rows: Iterable[PublishedRow], measure: Measure) -> list[Comparison]:
    """Return a comparison for every row with a measurement of memory or time and a prediction."""
    found = []
    for row in rows:
        why = row.why_memory_is_not_planned if measure == "memory" else row.why_time_is_not_planned
        measured = None if why else row.memory_gib if measure == "memory" else row.speed
        if measured is not None:
            predicted = predicted_gib(row) if measure == "memory" else predicted_speed(row)
            found.append(Comparison(row, predicted, measured))
    return found


def speeds_of_strangers(rows: Iterable[PublishedRow]) -> list[Comparison]:
    """Return a comparison for every speed of a row that can be planned; no rule leaves out an unusual run."""
    found = []
    for row in rows:
        if row.speed is not None and row.can_be_planned:
            with contextlib.suppress(UserError):  # an architecture that the planner has no profile for
                found.append(Comparison(row, predicted_speed(row), row.speed))
    return found


def errors(compared: Sequence[Comparison]) -> str:
    """Return the error columns of a row of the report."""
    sizes = [abs(one.error) for one in compared]
    within = sum(size <= WITHIN for size in sizes) / len(sizes)
    cells = (
        f"{len(sizes)}",
        f"{statistics.median(sizes):.1%}",
        f"{statistics.mean(sizes):.1%}",
        f"{statistics.median(one.error for one in compared):+.1%}",
        f"{within:.0%}",
        order(compared),
    )
    return " | ".join(cells)


def order(compared: Sequence[Comparison]) -> str:
    """Return the rank correlation of predictions and measurements, or `-` if either are all equal."""
    predicted, measured = [one.predicted for one in compared], [one.measured for one in compared]
    constant = len(set(predicted)) < 2 or len(set(measured)) < 2
    return "-" if constant else f"{rank_correlation(predicted, measured):.2f}"


def report(rows: Sequence[PublishedRow]) -> str:
    """Return a table of the errors in memory and time, by share and by the criteria in `KINDS`."""
    lines = [
        f"| share | measure | by | rows | median error | mean | median sign | within {WITHIN:.0%} | rank correlation |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for share in SHARES:
        for measure in ("memory", "time"):
            compared = comparisons((row for row in rows if row.share == share), measure)
            for kind, name_of in KINDS.items():
                names = sorted({name_of(one.row) for one in compared})
                for name in names:
                    part = [one for one in compared if name_of(one.row) == name]
                    lines.append(f"| {share} | {measure} | {kind}: {name} | {errors(part)} |")
    return "\n".join(lines)


def unplanned(rows: Sequence[PublishedRow]) -> str:
    """Return the numbers of measurements that cannot be compared with predictions, by reason."""
    counts: dict[tuple[str, str], int] = {}
    for row in rows:
        for measure, has, why in (
            ("memory", row.memory is not None or not row.fits, row.why_memory_is_not_planned),
            ("time", bool(row.tokens_per_second_per_gpu or row.step_seconds), row.why_time_is_not_planned),
        ):
            if has and why:
                counts[measure, why] = counts.get((measure, why), 0) + 1
    return "\n".join(
        f"not compared: {measure} of {count} rows: {why}" for (measure, why), count in sorted(counts.items())
    )


def main(arguments: Sequence[str] = ()) -> int:
    """Print the report; with `--rows`, also every comparison."""
    rows = published_rows()
    print(report(rows), unplanned(rows), sep="\n\n")
    measures: tuple[Measure, ...] = ("memory", "time") if "--rows" in arguments else ()
    for measure in measures:
        for one in comparisons(rows, measure):
            numbers = f"{one.predicted:,.1f} for {one.measured:,.1f} ({one.error:+.0%})"
            print(f"{one.row.share}, {measure}, {one.row}: {numbers}")
    return 0


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Return Spearman's rank correlation of two sequences of equal length, neither of them constant."""
    return statistics.correlation(_ranks(left), _ranks(right))


def _ranks(values: Sequence[float]) -> list[float]:
    """Return each value's rank; equal values get their mean rank."""
    return [sum(other < value for other in values) + sum(other == value for other in values) / 2 for value in values]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
