"""Turns the traces in a run folder into `profile/verdict.json`, and prints the verdict, when the run has ended."""

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from ...recipe.errors import UserError, first_line
from ...recipe.files import Json, JsonView
from ...recipe.run_folder import RunFolder, read_json, write_json
from . import verdict
from .trace import OTHERS, SUFFIX, read

Predict = Callable[[JsonView], Mapping[tuple[str, tuple[int, ...]], int]]
"""Returns the planner's bytes per step by kind of collective and ranks, given a trace's `about`."""


def at_end(run: RunFolder, predict: Predict = lambda about: {}) -> None:
    """Write and print the verdict on a finished run if it has recorded steps; errors are only printed."""
    if not any(run.profile.glob(f"rank-*{SUFFIX}")):
        return
    try:
        found = conclude(run.profile, predict)
        write_json(run.profile / "verdict.json", found)
        print("\n".join(["", *verdict_lines(found), f"traces       {run.profile}  (open one in ui.perfetto.dev)"]))
    except Exception as error:
        print(f"no verdict on {run.profile}: {type(error).__name__}: {first_line(error)}", file=sys.stderr)


def conclude(folder: Path, predict: Predict = lambda about: {}) -> Json:
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
    others = [read_json(file) for file in folder.glob(f"rank-*{OTHERS}")]
    times = [one["median"] for one in others if one["count"]]  # of steps that no rank recorded
    found = verdict.as_json(ranks, verdict.cause(ranks, about), about, median(times) if times else None)
    return found | {"traffic": traffic(found, predict(about))}


def traffic(found: JsonView, predicted: Mapping[tuple[str, tuple[int, ...]], int]) -> list[Json]:
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


def _rank(file: Path) -> int:
    digits = file.name.removesuffix(SUFFIX).rpartition("-")[2]
    return int(digits) if digits.isdigit() else -1


WIDTH = 50
"""Width of a bar, in characters."""
SUMMED = {"compute": "#", "communication_waited": "~", "data": "d", "host": "h", "idle": "."}
"""The parts that add up to a step, and their characters in a bar."""
NAMES = {
    "compute": "compute",
    "communication_waited": "communication waited for",
    "communication_hidden": "communication hidden",
    "data": "data",
    "host": "host",
    "idle": "idle",
}


def verdict_lines(found: JsonView) -> list[str]:
    """Return the lines to print for `verdict.json`."""
    return [
        f"profile      {span(found)}, {found['step_seconds']:.3g} s each{slower(found)}: {found['words']}",
        *_bars(found),
        *_operators(found),
        *_traffic(found),
        *([f"  {pipeline(found)}"] if found["pipeline"] else []),
        f"change       {found['change']}",
    ]


def span(found: JsonView) -> str:
    """Return the recorded steps."""
    steps = found["steps"]
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def slower(found: JsonView) -> str:
    """Return by how much recording slowed the steps down, or an empty string if there are no other steps."""
    more = found.get("slower")
    if more is None:
        return ""
    return f" ({abs(more):.0%} {'slower' if more >= 0 else 'faster'} than those that were not recorded)"


def bar(shares: Mapping[str, float]) -> str:
    """Return a rank's step as a bar of `WIDTH` characters."""
    drawn, passed = "", 0.0
    for kind, letter in SUMMED.items():
        passed += shares[kind]
        drawn += letter * (round(WIDTH * passed) - len(drawn))
    return drawn


def _bars(found: JsonView) -> Iterator[str]:
    yield "  " + "  ".join(f"{letter} {NAMES[kind]}" for kind, letter in SUMMED.items())
    for rank in found["ranks"]:
        shares = rank["shares"]
        parts = ", ".join(f"{NAMES[kind]} {shares[kind]:.0%}" for kind in NAMES if shares[kind] >= 0.005)
        yield f"  rank {rank['rank']:<3} {bar(shares)}  {parts}"


def _operators(found: JsonView) -> Iterator[str]:
    rank = found["ranks"][0]
    if rank["operators"]:
        yield f"  most expensive operators of rank {rank['rank']}, per step:"
    for one in rank["operators"]:
        share = one["seconds"] / rank["step_seconds"]
        yield f"    {share:>4.0%}  {one['calls']:>7,.0f}x  {one['name']:<44} {one['module'] or '-'}"


def _traffic(found: JsonView) -> Iterator[str]:
    if found["traffic"]:
        yield f"  communication of rank {found['ranks'][0]['rank']}, per step:"
    for one in found["traffic"]:
        group = f"ranks {','.join(map(str, one['ranks']))}" if one["ranks"] else ""
        planned = one["predicted_bytes"]
        predicted = f", planner {planned / 1e6:,.2f} MB" if planned else ""
        yield (
            f"    {one['kind']:<15} {one['count']:>6,.0f}x  {one['bytes'] / 1e6:,.2f} MB{predicted}  "
            f"{1000 * one['seconds']:,.0f} ms, {1000 * one['waited']:,.0f} of them waited for  "
            f"{one['bytes_per_second'] / 1e9:.2f} GB/s  {group}"
        ).rstrip()


def pipeline(found: JsonView) -> str:
    """Return how long a pipeline's stages wait, and how much of it is unavoidable."""
    one = found["pipeline"]
    return (
        f"pipeline: stages wait {one['waited']:.0%} of the time; {one['bubble']:.0%} is unavoidable with "
        f"{one['stages']} stages and {one['micro_batches']} micro-batches"
    )
