"""The section with the time of the steps recorded by `--profile`, from `profile/verdict.json`."""

from collections.abc import Iterator, Mapping
from typing import Any

from ..document import Bars, Block, Cell, Note, Section, Table, number
from ..run_data import RunData

NAMES = {
    "compute": "compute",
    "communication_waited": "communication waited for",
    "data": "data",
    "host": "host",
    "idle": "idle",
}
"""The parts that add up to a step, with their labels."""
FILE = "profile/verdict.json"


def section(run: RunData) -> Section:
    """Return the verdict in words, a bar per rank, the most expensive operators, and the communication."""
    return Section("Profile", tuple(_blocks(run.profile)))


def _blocks(found: Mapping[str, Any]) -> Iterator[Block]:
    steps = found["steps"]
    more = found.get("slower")
    recorded = "" if more is None else f" Recording made a step {more:+.0%} longer."
    yield Note(
        f"Steps {steps[0]} to {steps[-1]}, {found['step_seconds']:.3g} s each: {found['words']}.{recorded} "
        f"What to change: {found['change']}."
    )
    rows = []
    for at, rank in enumerate(found["ranks"]):
        shares = ((name, _share(rank, at, kind)) for kind, name in NAMES.items())
        rows.append((f"rank {rank['rank']}", tuple((name, one) for name, one in shares if one)))
    yield Bars("Shares of a step", tuple(rows))
    hidden = (
        (f"rank {rank['rank']}", _share(rank, at, "communication_hidden")) for at, rank in enumerate(found["ranks"])
    )
    yield Table(("", "communication hidden by computation"), tuple(hidden))
    yield Table(("operator", "module", "calls per step", "seconds per step"), tuple(_operators(found)))
    head = (
        "communication",
        "ranks",
        "per step",
        "bytes per step",
        "by the planner",
        "seconds",
        "waited for",
        "bytes per second",
    )
    yield Table(head, tuple(_traffic(found)))
    pipeline = found.get("pipeline")
    if pipeline:
        yield Note(
            f"Stages wait {pipeline['waited']:.0%} of the time; {pipeline['bubble']:.0%} is unavoidable with "
            f"{pipeline['stages']} stages and {pipeline['micro_batches']} micro-batches."
        )


def _share(rank: Mapping[str, Any], at: int, kind: str) -> Any:
    return number(rank["shares"].get(kind), ".1%", f"{FILE}:ranks.{at}.shares.{kind}")


def _operators(found: Mapping[str, Any]) -> Iterator[tuple[Cell, ...]]:
    for at, one in enumerate(found["ranks"][0]["operators"]):
        source = f"{FILE}:ranks.0.operators.{at}"
        calls = number(one["calls"], ",.0f", f"{source}.calls")
        yield one["name"], one["module"] or None, calls, number(one["seconds"], ".3g", f"{source}.seconds")


def _traffic(found: Mapping[str, Any]) -> Iterator[tuple[Cell, ...]]:
    for at, one in enumerate(found["traffic"]):
        source = f"{FILE}:traffic.{at}"
        yield (
            one["kind"],
            ", ".join(map(str, one["ranks"])) or None,
            number(one["count"], ",.0f", f"{source}.count"),
            number(one["bytes"], ",.0f", f"{source}.bytes"),
            number(one["predicted_bytes"], ",.0f", f"{source}.predicted_bytes"),
            number(one["seconds"], ".3g", f"{source}.seconds"),
            number(one["waited"], ".3g", f"{source}.waited"),
            number(one["bytes_per_second"], ",.0f", f"{source}.bytes_per_second"),
        )
