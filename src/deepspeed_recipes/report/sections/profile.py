"""The section with the time of the steps recorded by `--profile`, from `profile/verdict.json`."""

from ..page import Bars, Note, Section, Table
from ..profiler.words import NAMES, SUMMED, pipeline, span
from ..run_data import PROFILE, RunData

OPERATORS = {"calls": (",.0f", "calls per step"), "seconds": (".3g", "seconds per step")}
TRAFFIC = {
    "count": (",.0f", "per step"),
    "bytes": (",.0f", "bytes per step"),
    "predicted_bytes": (",.0f", "by the planner"),
    "seconds": (".3g", "seconds"),
    "waited": (".3g", "waited for"),
    "bytes_per_second": (",.0f", "bytes per second"),
}
"""Numbers of an operator and of a collective, with their formats and their columns."""


def section(run: RunData) -> Section:
    """Return the verdict in words, a bar per rank, the most expensive operators, and the communication."""
    found = run.profile
    more = "" if found.get("slower") is None else f" Recording made a step {found['slower']:+.0%} longer."
    verdict = (
        f"{span(found).capitalize()}, {found['step_seconds']:.3g} s each: {found['words']}.{more} "
        f"What to change: {found['change']}."
    )
    bars, hidden = [], []
    for at, rank in enumerate(found["ranks"]):
        shares = {kind: run.number(f"{PROFILE}:ranks.{at}.shares.{kind}", ".1%") for kind in NAMES}
        name = f"rank {rank['rank']}"
        bars.append((name, tuple((NAMES[kind], one) for kind in SUMMED if (one := shares[kind]))))
        hidden.append((name, shares["communication_hidden"]))
    operators = tuple(
        (
            one["name"],
            one["module"] or None,
            *(run.number(f"{PROFILE}:ranks.0.operators.{at}.{key}", form) for key, (form, _) in OPERATORS.items()),
        )
        for at, one in enumerate(found["ranks"][0]["operators"])
    )
    traffic = tuple(
        (
            one["kind"],
            ", ".join(map(str, one["ranks"])) or None,
            *(run.number(f"{PROFILE}:traffic.{at}.{key}", form) for key, (form, _) in TRAFFIC.items()),
        )
        for at, one in enumerate(found["traffic"])
    )
    blocks = (
        Note(verdict),
        Bars("Shares of a step", tuple(bars)),
        Table(("", "communication hidden by computation"), tuple(hidden)),
        Table(("operator", "module", *(title for _, title in OPERATORS.values())), operators),
        Table(("communication", "ranks", *(title for _, title in TRAFFIC.values())), traffic),
        *((Note(f"{pipeline(found).capitalize()}."),) if found.get("pipeline") else ()),
    )
    return Section("Profile", blocks)
