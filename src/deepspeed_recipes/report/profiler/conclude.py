"""From the traces in a run folder to `profile/verdict.json` and to words on the screen, when the run has ended."""

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
"""Returns the bytes of a step by kind of collective and its ranks, as the planner counts them, from a trace's `about`.
"""


def at_end(run: RunFolder, predict: Predict = lambda about: {}) -> None:
    """Write and print the verdict on a run that has ended, if it has recorded steps; no run fails because of it."""
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
        UserError: a trace is damaged, or there is none.
    """
    files = sorted(folder.glob(f"rank-*{SUFFIX}"), key=_rank)
    if not files:
        raise UserError(f"{folder}: no trace in it.")
    ranks, about = [], dict[str, Any]()
    for file in files:  # one after the other: a trace takes twenty times its file in memory
        trace = read(file)
        ranks.append(verdict.of_trace(trace))
        about = about or dict(trace.about)
    found = verdict.as_json(ranks, verdict.cause(ranks, about), about, _others(folder))
    return found | {"traffic": traffic(found, predict(about))}


def traffic(found: Mapping[str, Any], predicted: Mapping[tuple[str, tuple[int, ...]], int]) -> list[dict[str, Any]]:
    """Return the first rank's collectives per step, by kind and group, with what the planner counts."""
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
    """Return the median time of the steps that no rank recorded, in seconds; None: there were none."""
    found = [read_json(file) for file in folder.glob(f"rank-*{OTHERS}")]
    times = [one["median"] for one in found if one["count"]]
    return median(times) if times else None


def _rank(file: Path) -> int:
    digits = file.name.removesuffix(SUFFIX).rpartition("-")[2]
    return int(digits) if digits.isdigit() else -1
