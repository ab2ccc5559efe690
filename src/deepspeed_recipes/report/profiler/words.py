"""Formats the verdict as text, with a stacked bar per rank."""

from collections.abc import Iterator, Mapping
from typing import Any

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


def lines(found: Mapping[str, Any]) -> list[str]:
    """Return the lines to print for `verdict.json`."""
    return [
        f"profile      {span(found)}, {found['step_seconds']:.3g} s each{slower(found)}: {found['words']}",
        *_bars(found),
        *_operators(found),
        *_traffic(found),
        *([f"  {pipeline(found)}"] if found["pipeline"] else []),
        f"change       {found['change']}",
    ]


def span(found: Mapping[str, Any]) -> str:
    """Return the recorded steps."""
    steps = found["steps"]
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def slower(found: Mapping[str, Any]) -> str:
    """Return by how much recording slowed the steps down, or an empty string if there are no other steps."""
    more = found["slower"]
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


def _bars(found: Mapping[str, Any]) -> Iterator[str]:
    yield "  " + "  ".join(f"{letter} {NAMES[kind]}" for kind, letter in SUMMED.items())
    for rank in found["ranks"]:
        shares = rank["shares"]
        parts = ", ".join(f"{NAMES[kind]} {shares[kind]:.0%}" for kind in NAMES if shares[kind] >= 0.005)
        yield f"  rank {rank['rank']:<3} {bar(shares)}  {parts}"


def _operators(found: Mapping[str, Any]) -> Iterator[str]:
    rank = found["ranks"][0]
    if rank["operators"]:
        yield f"  most expensive operators of rank {rank['rank']}, per step:"
    for one in rank["operators"]:
        share = one["seconds"] / rank["step_seconds"]
        yield f"    {share:>4.0%}  {one['calls']:>7,.0f}x  {one['name']:<44} {one['module'] or '-'}"


def _traffic(found: Mapping[str, Any]) -> Iterator[str]:
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


def pipeline(found: Mapping[str, Any]) -> str:
    """Return how long a pipeline's stages wait, and how much of it is unavoidable."""
    one = found["pipeline"]
    return (
        f"pipeline: stages wait {one['waited']:.0%} of the time; {one['bubble']:.0%} is unavoidable with "
        f"{one['stages']} stages and {one['micro_batches']} micro-batches"
    )
