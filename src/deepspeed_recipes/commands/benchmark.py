"""Measure recipes, and compare them with the usual alternatives.

    ds-recipes benchmark all                      # every benchmark below, one after the other
    ds-recipes benchmark full_1b lora_8b --quick  # some of them, one run per contender instead of two
    ds-recipes benchmark overhead --zero-stage 3 --steps 60 --rounds 3
    ds-recipes benchmark scaling --gpus 4         # efficiency of 1, 2 and 4 ranks, compared with the planner's
    ds-recipes benchmark lora_8b --draft          # shrunken models: does it run? (the default without a GPU)

Contenders train on the same sequences of random tokens, with random weights of the real dimensions, so nothing is
downloaded. They take turns (A B B A), each run in its own process: 10 warm-up steps, 20 timed steps, and one step in
which the host's reads from the device are counted; in `planner_error` each runs once, for 3 and 5 steps. Padding tokens
are not counted. MFU is the FLOPs of training/callbacks/metrics.py (causal attention once, no input embedding, no
recomputation, adapters included) divided by the manufacturer's peak; next to it is the share of the matrix-product rate
measured on this machine. Each benchmark ends within 8 minutes on one GPU (`--quick`: 4), `all` within `--minutes`, with
the questions first that matter most: what is not reached is left out. Results are written after every run, so an
interrupted one keeps them.

Results are written to benchmarks/NAME_gpu.json and .md, or to the folder that --output names. Results of drafts are
kept only with --output, as NAME_draft.json. `make docs` puts what is in scripts/maintain/measurements/ into the
documents.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path

from ..benchmarks import cases, overhead, own_process, scaling
from ..benchmarks.cases import ALL, BENCHMARKS, CASE, FEW, LIMIT, STEPS, WARM_UP, Benchmark, Case
from ..launching.command import rank_count, visible_gpus
from ..machine import children
from ..recipe import files
from ..recipe.errors import UserError
from ..recipe.files import Json
from ..recipe.project import require
from ..recipe.run_folder import write_json
from .main import Parser

RESULTS = Path("benchmarks")
"""Default folder for results."""
SHORTEST, LONGEST = 8192, 2**20
"""The shortest and the longest sequence of `long_context`, in tokens."""
Start = Callable[[Json, Path, float], Json]
"""Runs an order in a separate process: maps order, folder and time limit to numbers, or to `{"error": ...}`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks that are asked for, print their tables, and write their results."""
    parser = Parser("benchmark", __doc__)
    about = {
        "overhead": "a small recipe compared with the same training without this project",
        "scaling": "1, 2, 4 and 8 ranks with the same work per rank and in all; 18 minutes on two cores",
        **{one.name: one.about for one in BENCHMARKS.values()},
    }
    parser.epilog = "benchmarks:\n" + "\n".join(f"  {name:<14} {what}" for name, what in about.items())
    parser.add_argument("benchmark", nargs="+", choices=["all", *about], metavar="BENCHMARK")
    parser.add_argument("--quick", action="store_true", help="one run per contender, half the time")
    parser.add_argument("--draft", action="store_true", help="shrunken models, a few steps; not a measurement")
    parser.add_argument(
        "--minutes",
        type=float,
        default=ALL,
        metavar="M",
        help="time limit of all benchmarks together (default: %(default)s)",
    )
    parser.add_argument("--output", type=Path, help=f"folder for results (default: {RESULTS})")
    overhead.add_arguments(parser)
    options = parser.parse_intermixed_args(arguments)
    names = [*BENCHMARKS, "overhead"] if "all" in options.benchmark else options.benchmark
    for name in ("minutes", "rounds", "gpus", "micro_batch", "length"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} {value}: must be above 0")
    if {"overhead", "scaling"} & set(names) and options.steps < overhead.FEWEST:
        parser.error(f"--steps {options.steps}: {overhead.WARM_UP} are warm-up; at least {overhead.FEWEST} are needed")
    if not {"overhead", "scaling"} & set(names):
        parser.refuse(options, overhead.OPTIONS, "only overhead and scaling read it")
    if options.output is not None:
        files.check_writable("--output", options.output, folder=True)
    require("deepspeed")
    failed = []
    end = time.monotonic() + 60 * options.minutes
    for left, name in zip(range(len(names), 0, -1), names, strict=True):
        try:
            if name in BENCHMARKS:
                result = run(BENCHMARKS[name], options, own_process.start, share(end - time.monotonic(), left))
                for label, runs in result["runs"].items():
                    errors = [done["error"] for done in runs if "error" in done]
                    # Out of memory counts as a measurement.
                    failed += [f"{name}: {label}: {one}" for one in errors if one != own_process.OUT_OF_MEMORY]
            else:
                of_small_recipe(name, options)
        except Exception as error:  # the rest of the list still runs
            failed.append(f"{name}: {error}")
    for line in failed:
        print(line, file=sys.stderr, flush=True)
    return 1 if failed else 0


def share(seconds: float, benchmarks: int) -> float:
    """Return the time limit of the next benchmark, in seconds: one and a half times an equal share of the time left.

    Most benchmarks need less, and leave the rest to the following ones. `benchmarks` counts those that are left, this
    one included.
    """
    return max(1.0, seconds * min(1, 1.5 / benchmarks))


def of_small_recipe(name: str, options: argparse.Namespace) -> None:
    """Run `overhead` or `scaling`, print its result, and write it."""
    gpus = visible_gpus()
    counts = scaling.counts(options.gpus, gpus) if name == "scaling" else [rank_count(options.gpus, gpus)]
    short = options.draft and name == "overhead"
    output, device = options.output or RESULTS, "gpu" if gpus else "cpu"
    with children.scratch() as folder:
        bench = overhead.Bench(
            zero_stage=options.zero_stage,
            steps=overhead.FEWEST if short else options.steps,
            ranks=counts[-1],
            gpus=gpus,
            micro_batch=options.micro_batch,
            length=options.length,
            dtype=options.dtype,
            folder=folder,
        )
        if name == "overhead":
            result = overhead.overhead(bench, 1 if short else options.rounds, LIMIT)
            print(overhead.table(result))
            write_json(output / f"overhead_zero{bench.zero_stage}_{device}.json", result)
        else:
            result = scaling.scaling(bench, counts, options.rounds)
            print(f"\n{scaling.section(result)}")
            write_json(output / f"scaling_{device}.json", result)
            files.write_text(output / f"scaling_{device}.md", scaling.section(result))
            files.write_bytes(output / f"scaling_{device}.png", scaling.png(result))


def run(benchmark: Benchmark, options: argparse.Namespace, start: Start, seconds: float = float("inf")) -> Json:
    """Run one benchmark for at most `seconds`, write its results after each of its runs, and return them."""
    draft = options.draft or not visible_gpus()
    warm_up, steps = (2, 3) if draft else FEW if benchmark.estimates else (WARM_UP, STEPS)
    result: Json = {
        "benchmark": benchmark.name,
        "about": benchmark.about,
        "date": date.today().isoformat(),
        "draft": draft,
        "cases": [asdict(case) for case in benchmark.cases],
        "runs": {case.label: [] for case in benchmark.cases if case.on_cpu or not draft},
        "seconds": 0.0,
        "complete": False,
    }
    began = time.monotonic()
    limit = min(seconds, LIMIT / (2 if options.quick else 1))

    def ask(case: Case | None) -> Json:
        order = {"case": asdict(case) if case else "limits", "warm_up": warm_up, "steps": steps, "draft": draft}
        with children.scratch() as folder:
            found = start(order, folder, min(CASE, limit - (time.monotonic() - began)))
        result["seconds"] = round(time.monotonic() - began, 1)
        return found

    # In another process, since this process must not hold GPU memory.
    limits = ask(None)
    if "error" in limits:
        raise UserError(f"{benchmark.name}: this machine's rates could not be measured:\n{limits['error']}")
    result |= limits
    if benchmark.grows:
        result["longest"] = {}
        for case in benchmark.cases:
            result["longest"][case.label] = _grow(case, ask, draft, began + limit)
            write_result(result, options.output)
    else:
        turns = [case for case in benchmark.cases if case.label in result["runs"]]
        once = options.quick or draft or benchmark.estimates
        for case in turns if once else [*turns, *reversed(turns)]:
            done = result["runs"][case.label]
            if done and "error" in done[-1]:
                continue  # it would only fail again
            took = max([run["seconds"] for runs in result["runs"].values() for run in runs], default=0)
            if time.monotonic() - began + took > limit:
                break
            at = time.monotonic()
            done.append(ask(case) | {"seconds": time.monotonic() - at})
            print(f"{case.label:<26} {_line(done[-1])}", flush=True)
            write_result(result, options.output)
        else:
            result["complete"] = True
    write_result(result, options.output)
    print(f"\n{cases.heading(result)}\n{cases.table(result)}")
    ending = "" if result["complete"] or benchmark.grows else "; out of time before every contender had all of its runs"
    print(f"{benchmark.name}: {result['seconds']:.0f} of at most {limit:.0f} s{ending}\n", flush=True)
    return result


def _grow(case: Case, ask: Callable[[Case], Json], draft: bool, deadline: float) -> tuple[int, str]:
    """Return the longest sequence that trained, in tokens, and why the next length did not."""
    longest, length = 0, SHORTEST
    while length <= (2 * SHORTEST if draft else LONGEST):
        if time.monotonic() > deadline - 30:
            return longest, "not tried: out of time"
        found = ask(replace(case, changes=(*case.changes, f"sequence_length={length}")))
        print(f"{case.label:<26} sequences of {length:,} tokens: {_line(found)}", flush=True)
        if "error" in found:
            return longest, f"{length:,}: {found['error']}"
        longest, length = length, 2 * length
    return longest, "not tried"


def _line(found: Json) -> str:
    if "error" in found:
        return str(found["error"])
    peak = found.get("peak_allocated_gib", found["host_peak_gib"])
    return f"{found['tokens_per_second']:>9,.0f} tokens/s {peak:>8.2f} GiB {found['reads_per_step']:>4} reads per step"


def write_result(result: Json, output: Path | None) -> None:
    """Write the numbers and the table; a draft's only if a folder is given."""
    if result["draft"] and output is None:
        return
    folder = output or RESULTS
    name = f"{result['benchmark']}_{'draft' if result['draft'] else 'gpu'}"
    write_json(folder / f"{name}.json", result)
    files.write_text(folder / f"{name}.md", f"{cases.heading(result)}\n\n{cases.table(result)}\n")
