"""Turns the traces in a run folder into `profile/verdict.json`, and prints the verdict, when the run has ended."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from ...recipe.errors import UserError, first_line
from ...recipe.run_folder import RunFolder, read_json, write_json
from . import verdict, words
from .trace import OTHERS, SUFFIX, read

Predict = Callable[[Mapping[str, Any]], Mapping[tuple[str, tuple[int, ...]], int]]
"""Returns the planner's bytes per step by kind of collective and ranks, given a trace's `about`."""


def at_end(run: RunFolder, predict: Predict = lambda about: {}) -> None:
    """Write and print the verdict on a finished run if it has recorded steps; errors are only printed."""
    if not any(run.profile.glob(f"rank-*{SUFFIX}")):
        return
    try:
        found = conclude(run.profile, predict)
        write_json(run.profile / "verdict.json", found)
        print("\n".join(["", *words.lines(found), f"traces       {run.profile}  (open one in ui.perfetto.dev)"]))
    except Exception as error:
        print(f"no verdict on {run.profile}: {type(error).__name__}: {first_line(error)}", file=sys.stderr)


def conclude(folder: Path, predict: Predict = lambda about: {}) -> dict[str, Any]:
    """Return the verdict on the traces in a folder.

    Raises:
        UserError: a trace is damaged, or the folder has none.
    """
    files = sorted(folder.glob(f"rank-*{SUFFIX}"), key=_rank)
    if not files:
        raise UserError(f"{folder}: contains no traces.")
    ranks, about = [], dict[str, Any]()
    for file in files:  # one at a time: a trace takes twenty times its file's size in memory
        trace = read(file)
        ranks.append(verdict.of_trace(trace))
        about = about or dict(trace.about)
    found = verdict.as_json(ranks, verdict.cause(ranks, about), about, _others(folder))
    return found | {"traffic": traffic(found, predict(about))}


def traffic(found: Mapping[str, Any], predicted: Mapping[tuple[str, tuple[int, ...]], int]) -> list[dict[str, Any]]:
    """Return the first rank's collectives per step, by kind and group, with the planner's bytes."""
    steps = len(found["steps"])
    rows = []
    for one in sorted(found["ranks"][0]["collectives"], key=lambda one: -one["bytes"]):
        row = {key: one[key] / steps for key in ("count", "bytes", "seconds", "waited")}
        rows.append(
            {"kind": one["kind"], "ranks": one["ranks"], **row}
            | {
                "bytes_per_second": one["bytes_per_second"],
                "predicted_bytes": predicted.get((one["kind"], tuple(one["ranks"]))),
            }
        )
    return rows


def _others(folder: Path) -> float | None:
    """Return the median time in seconds of the steps that no rank recorded, or None if there were none."""
    found = [read_json(file) for file in folder.glob(f"rank-*{OTHERS}")]
    times = [one["median"] for one in found if one["count"]]
    return median(times) if times else None


def _rank(file: Path) -> int:
    digits = file.name.removesuffix(SUFFIX).rpartition("-")[2]
    return int(digits) if digits.isdigit() else -1
