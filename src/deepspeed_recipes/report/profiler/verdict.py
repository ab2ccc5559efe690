"""The verdict on a run's recorded steps: their bottleneck, and a setting to change; written when the run has ended."""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from ...recipe.errors import UserError, first_line
from ...recipe.files import Json, JsonView
from ...recipe.layout import bubble, rank_position
from ...recipe.recipe import Layout
from ...recipe.run_folder import RunFolder, read_json, write_json
from ..run_data import rank_of
from . import collectives, shares
from .collectives import Collective
from .shares import Operator, Shares
from .trace import OTHERS, SUFFIX, RankTrace, read

MATTERS = 0.15
"""Share of a step above which time without computation is worth reducing."""
KINDS = ("compute", "communication_hidden", "communication_waited", "data", "host", "idle")


@dataclass(frozen=True)
class Rank:
    """The analysed record of one rank."""

    number: int
    host: str
    steps: tuple[int, ...]
    measured: float
    """Duration of the recorded steps in seconds, by the rank's clock."""
    shares: Shares
    operators: tuple[Operator, ...]
    collectives: tuple[Collective, ...]
    optimizer: float
    """Time in the optimizer's step, in seconds."""

    def share(self, kind: str) -> float:
        """Return the share of a kind of time in the rank's steps."""
        return getattr(self.shares, kind) / self.shares.seconds if self.shares.seconds else 0.0


@dataclass(frozen=True)
class Cause:
    """The bottleneck of the steps."""

    name: str
    """`compute`, `communication`, `pipeline`, `data`, `host`, `optimizer`, `idle`, `slow rank` or `slow stage`."""
    words: str
    change: str
    """A line with the setting to change."""


def of_trace(trace: RankTrace) -> Rank:
    """Return the analysis of one rank's trace."""
    steps = trace.steps
    spans = [event for event in trace.events if event.name.startswith("Optimizer.step#")]
    return Rank(
        number=trace.about.get("rank", 0),
        host=trace.about.get("host", ""),
        steps=tuple(one["step"] for one in trace.about.get("steps", ())),
        measured=sum(one["seconds"] for one in trace.about.get("steps", ())),
        shares=shares.of_rank(trace),
        operators=tuple(shares.most_expensive(trace)),
        collectives=tuple(collectives.of_rank(trace)),
        optimizer=sum(event.end - event.begin for event in spans if event.begin < steps[-1].end) / 1e6,
    )


def cause(ranks: list[Rank], about: Json) -> Cause:
    """Return the bottleneck of the steps, given the `about` of any rank's trace."""
    if slow := _slow(ranks, about):
        return slow
    most = {kind: mean(rank.share(kind) for rank in ranks) for kind in (*KINDS[3:], "communication_waited")}
    worst = max(most, key=lambda kind: most[kind])
    share = most[worst]
    if share < MATTERS:
        return Cause(
            "compute",
            f"it computes {mean(rank.share('compute') for rank in ranks):.0%} of the time",
            f"nothing is certain to help: no other share is above {share:.0%} ({worst.partition('_')[0]}); a larger "
            "micro_batch_size may use the hardware better",
        )
    if worst == "communication_waited":
        return _communication(share, ranks, about)
    if worst == "data":
        change = "set data.workers=4 to load ahead in separate processes, or packing=true for fewer, fuller sequences"
        return Cause("data", f"it waits for data {share:.0%} of the time", change)
    if worst == "idle":
        change = (
            "other processes may use its cores (run fewer ranks: --gpus), or it waits for a disk (deepspeed=...nvme...)"
        )
        return Cause("idle", f"it is idle {share:.0%} of the time", change)
    optimizer = mean(rank.optimizer / rank.shares.seconds for rank in ranks if rank.shares.seconds)
    if about.get("offload_optimizer", "none") != "none" and optimizer > share / 2:
        return Cause(
            "optimizer",
            f"the optimizer on the host takes {optimizer:.0%} of the time",
            "set deepspeed=zero2.json or zero3.json to keep it on the GPUs, if it fits; otherwise a larger "
            "global_batch_size updates less often",
        )
    return Cause(
        "host",
        f"Python between operators takes {share:.0%} of the time",
        "a larger micro_batch_size gives each operator more work; compile=regional or a lower ZeRO stage runs less "
        "Python",
    )


def _waited(rank: Rank) -> float:
    return rank.share("communication_waited")


def _unavoidable(stages: int, micro_batches: int) -> str:
    share = bubble(stages, micro_batches)
    return f"{share:.0%} is unavoidable with {stages} stages and {micro_batches} micro-batches"


def _slow(ranks: list[Rank], about: Json) -> Cause | None:
    """Return the cause if the others wait for one rank or the ranks of one pipeline stage, or None."""
    stages = about.get("layout", {}).get("pipeline", 1)
    # Stages of a pipeline are compared as a whole: equally fast ones all wait as long, for it to fill and drain.
    groups: dict[int, list[Rank]] = defaultdict(list)
    for number, rank in enumerate(sorted(ranks, key=_waited)):
        if stages > 1:
            number = rank_position(Layout(**about["layout"]), rank.number, about["world_size"]).stage
        groups[number].append(rank)
    waits = {key: mean(map(_waited, group)) for key, group in groups.items()}
    least, *rest = sorted(waits, key=lambda key: waits[key])
    if not rest or median(waits[key] for key in rest) - waits[least] <= MATTERS:
        return None
    first, others = groups[least][0], [rank for rank in ranks if rank not in groups[least]]
    more = {kind: first.share(kind) - mean(rank.share(kind) for rank in others) for kind in ("compute", *KINDS[3:])}
    what = max(more, key=lambda kind: more[kind])
    who = f"rank {first.number} on {first.host}"
    waiting = f"is slow ({what}): the others wait {median(map(_waited, others)):.0%} of the time"
    if stages > 1:
        return Cause(
            "slow stage",
            f"stage {least} ({who}) {waiting}; {_unavoidable(stages, about['micro_batches'])}",
            f"{who}: check that host for other processes, or a slower or hotter GPU; if the stage itself is larger "
            "(the last one has the head), try another layout.pipeline",
        )
    fixes = {
        "compute": "check that host for other processes, a slower or hotter GPU, or a larger part of the model",
        "data": "set data.workers=4 to load ahead in separate processes, and check that host's disk",
        "host": "check that host for other processes, fewer cores or a slower CPU",
        "idle": "check that host for other processes, a slow disk, or code that sleeps",
    }
    return Cause("slow rank", f"{who} {waiting}", f"{who}: {fixes[what]}")


def _communication(share: float, ranks: list[Rank], about: Json) -> Cause:
    layout = about.get("layout", {})
    if (stages := layout.get("pipeline", 1)) > 1:
        return Cause(
            "pipeline",
            f"stages wait for each other {share:.0%} of the time; {_unavoidable(stages, about['micro_batches'])}",
            "a larger global_batch_size or a smaller micro_batch_size gives more micro-batches, so stages wait less",
        )
    totals: dict[tuple[str, tuple[int, ...]], float] = defaultdict(float)
    for rank in ranks:
        for one in rank.collectives:
            totals[one.kind, one.ranks] += one.waited
    kind, group = max(totals, key=lambda key: totals[key], default=("communication", ()))
    who = f" of ranks {', '.join(map(str, group))}" if group else ""
    if layout.get("tensor", 1) > 1 or layout.get("sequence", 1) > 1:
        changes = ["a smaller layout.tensor or layout.sequence, within one host, communicates less"]
    elif about.get("stage", 0) < 2:
        changes = ["a larger global_batch_size with the same micro_batch_size communicates less often per token"]
    else:  # at stages 2 and 3 every micro-batch communicates, so more of them do not help
        changes = []
        gathered = sum(one.bytes for one in ranks[0].collectives if one.kind == "all-gather") / len(ranks[0].steps)
        whole = about.get("held", {}).get("total", 0) * about.get("weight_bytes", 0)
        # Weights are gathered more than once per update, and not only within a host.
        if whole and about.get("partition_size", 1) == 1 and gathered > 1.1 * whole:
            changes.append("deepspeed=zero3_hpz.json gathers weights over the network once per step")
        if about.get("micro_batches", 1) > 1:
            changes.append("deepspeed=zero1.json, if it fits, communicates once per step instead of per micro-batch")
        changes.append("a larger micro_batch_size communicates less often per token")
    words = f"it waits for the network {share:.0%} of the time, mostly for {kind}{who}"
    return Cause("communication", words, "; ".join(changes))


def as_json(ranks: list[Rank], found: Cause, about: Json, others: float | None) -> Json:
    """Return the content of `verdict.json`. Operators and, in `traffic`, collectives are per step.

    `found` is the bottleneck of the ranks' steps, `about` any trace's facts, and `others` the median seconds of the
    steps that were not recorded, over all ranks, or None if there were none.
    """
    count = len(ranks[0].steps)
    recorded = mean(rank.measured for rank in ranks) / count
    layout, micro_batches = about.get("layout", {}), about.get("micro_batches", 1)
    stages = layout.get("pipeline", 1)
    return {
        "steps": list(ranks[0].steps),
        "step_seconds": recorded,
        "other_step_seconds": others,
        "slower": recorded / others - 1 if others else None,
        "bound_by": found.name,
        "words": found.words,
        "change": found.change,
        "ranks": [
            {
                "rank": rank.number,
                "host": rank.host,
                "step_seconds": rank.measured / count,
                "shares": {kind: rank.share(kind) for kind in KINDS},
                "operators": [
                    asdict(one) | {"calls": one.calls / count, "seconds": one.seconds / count} for one in rank.operators
                ],
                "collectives": [
                    asdict(one) | {"ranks": list(one.ranks), "bytes_per_second": one.bandwidth}
                    for one in rank.collectives
                ],
            }
            for rank in ranks
        ],
        "pipeline": {
            "stages": stages,
            "micro_batches": micro_batches,
            "waited": mean(rank.share("communication_waited") for rank in ranks),
            "bubble": bubble(stages, micro_batches),
        }
        if stages > 1
        else None,
    }


Predict = Callable[[JsonView], Mapping[tuple[str, tuple[int, ...]], int]]
"""Returns the planner's bytes per step by kind of collective and ranks, given a trace's `about`."""


def at_end(run: RunFolder, predict: Predict = lambda about: {}) -> None:
    """Write and print the verdict on a finished run if it has recorded steps; errors are only printed."""
    if not any(run.profile.glob(f"rank-*{SUFFIX}")):
        return
    try:
        found = conclude(run.profile, predict)
        write_json(run.profile / "verdict.json", found)
        lines = [
            "",
            f"profile      {span(found)}, {found['step_seconds']:.3g} s each{slower(found)}: {found['words']}",
            *_lines(found),
            *([f"  {pipeline(found)}"] if found["pipeline"] else []),
            f"change       {found['change']}",
            f"traces       {run.profile}  (open one in ui.perfetto.dev)",
        ]
        print("\n".join(lines))
    except Exception as error:
        print(f"no verdict on {run.profile}: {type(error).__name__}: {first_line(error)}", file=sys.stderr)


def conclude(folder: Path, predict: Predict = lambda about: {}) -> Json:
    """Return the verdict on the traces in a folder."""
    files = sorted(folder.glob(f"rank-*{SUFFIX}"), key=rank_of)
    if not files:
        raise UserError(f"{folder}: contains no traces.")
    ranks, about = [], dict[str, Any]()
    for file in files:  # one at a time: a trace takes twenty times its file's size in memory
        trace = read(file)
        ranks.append(of_trace(trace))
        about = about or dict(trace.about)
    others = [read_json(file) for file in folder.glob(f"rank-*{OTHERS}")]
    times = [one["median"] for one in others if one["count"]]  # of steps that no rank recorded
    found = as_json(ranks, cause(ranks, about), about, median(times) if times else None)
    # The first rank's collectives per step, with the planner's bytes.
    predicted, steps, traffic = predict(about), len(found["steps"]), []
    for one in sorted(found["ranks"][0]["collectives"], key=lambda one: -one["bytes"]):
        row = {"kind": one["kind"], "ranks": one["ranks"]}
        row |= {key: one[key] / steps for key in ("count", "bytes", "seconds", "waited")}
        row["bytes_per_second"] = one["bytes_per_second"]
        traffic.append(row | {"predicted_bytes": predicted.get((one["kind"], tuple(one["ranks"])))})
    return found | {"traffic": traffic}


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


def span(found: JsonView) -> str:
    """Return the recorded steps."""
    steps = found["steps"]
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def slower(found: JsonView) -> str:
    """Return by how much recording slowed the steps down, or an empty string if there are no other steps."""
    more = found.get("slower")
    if more is None:
        return ""
    return f" ({more:.0%} slower than the others)" if more >= 0.005 else " (no slower than the others)"


def bar(shares: Mapping[str, float]) -> str:
    """Return a rank's step as a bar of `WIDTH` characters."""
    drawn, passed = "", 0.0
    for kind, letter in SUMMED.items():
        passed += shares[kind]
        drawn += letter * (round(WIDTH * passed) - len(drawn))
    return drawn


def _lines(found: JsonView) -> Iterator[str]:
    """Yield a bar for each rank, and the first rank's operators and collectives."""
    yield "  " + "  ".join(f"{letter} {NAMES[kind]}" for kind, letter in SUMMED.items())
    for rank in found["ranks"]:
        shares = rank["shares"]
        parts = ", ".join(f"{NAMES[kind]} {shares[kind]:.0%}" for kind in NAMES if shares[kind] >= 0.005)
        yield f"  rank {rank['rank']:<3} {bar(shares)}  {parts}"
    first = found["ranks"][0]
    if first["operators"]:
        yield f"  most expensive operators of rank {first['rank']}, per step:"
    for one in first["operators"]:
        share = one["seconds"] / first["step_seconds"]
        yield f"    {share:>4.0%}  {one['calls']:>7,.0f}x  {one['name']:<44} {one['module'] or '-'}"
    if found["traffic"]:
        yield f"  communication of rank {first['rank']}, per step:"
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
    unavoidable = _unavoidable(one["stages"], one["micro_batches"])
    return f"pipeline: stages wait {one['waited']:.0%} of the time; {unavoidable}"
