"""`scaling`: 1, 2, 4 and 8 ranks with the same work per rank (weak) and with the same total work (strong).

Efficiency is the throughput of n ranks divided by n times the throughput of one rank. The table compares it with the
planner's prediction, on a CPU only after `doctor --measure`. Each CPU rank computes with one thread, and so uses one
core. If there are more ranks than cores, they share cores: both numbers include that, and the table marks it.
"""

import io
import os
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from itertools import pairwise

from ..launching import paths
from ..launching.command import deepspeed_command
from ..machine import children
from ..planning.search import forecast, strategies
from ..recipe import pages
from ..recipe.errors import UserError
from ..recipe.files import Json, JsonView
from ..recipe.recipe import Draft, Recipe
from ..recipe.run_folder import RunFolder, read_jsonl, write_recipe
from . import overhead
from .overhead import Bench

MOST, MOST_ON_CPU = 8, 4
"""The default number of ranks, with and without GPUs."""
KINDS = {"weak": "the same work per rank", "strong": "the same work in all"}
COLOURS = 64
"""The size of the figure's palette."""


def counts(asked: int | None, gpus: int) -> list[int]:
    """Return the numbers of ranks to run: 1, 2, 4, ... up to `asked`."""
    most = asked or min(MOST, gpus) or MOST_ON_CPU
    found = [2**power for power in range(most.bit_length())]
    if len(found) < 2 or (gpus and most > gpus):
        has = f"this machine has {gpus}" if gpus else "without GPUs these are CPU ranks"
        raise UserError(f"scaling compares 1 rank with 2 or more, --gpus {most} are asked for, and {has}.")
    return found


def scaling(bench: Bench, ranks: Sequence[int], rounds: int) -> Json:
    """Return tokens per second and step time of every number of ranks, in each round, and the planner's efficiency."""
    runs: dict[str, dict[str, list[dict[str, float]]]] = {kind: {str(n): [] for n in ranks} for kind in KINDS}
    for turn in range(rounds):
        for count in ranks if turn % 2 == 0 else reversed(ranks):
            for kind in KINDS:
                if kind == "strong" and count == ranks[-1]:  # the same run as the weak one
                    measured = runs["weak"][str(count)][-1]
                else:
                    measured = run(bench, ranks, kind, count, turn)
                    print(f"{kind:<6} {count:>2} ranks {measured['tokens_per_second']:>9,.0f} tokens/s", flush=True)
                runs[kind][str(count)].append(measured)
    from ..training.distributed import describe_environment

    settings = {key: value for key, value in vars(bench).items() if key not in ("folder", "gpus", "ranks")}
    return {
        "benchmark": "scaling",
        "date": date.today().isoformat(),
        "settings": settings,
        "environment": describe_environment(),
        "cores": len(os.sched_getaffinity(0)),
        "runs": runs,
        "predicted": predicted(bench, ranks),
    }


def recipe_of(bench: Bench, ranks: Sequence[int], kind: str, count: int) -> Recipe:
    """Return the recipe for `count` ranks: `tiny full` on a CPU, random weights of Llama 3.2 1B's size on GPUs."""
    recipe = overhead.recipe_of(bench)
    if bench.gpus:
        page = pages.find("llama3-1b", "full")
        draft = Draft(enabled=True, layers=page.model.config["num_hidden_layers"], hidden_size=2048)
        recipe = paths.locate(replace(recipe, model=page.model, draft=draft, compile=page.compile))
    whole = bench.micro_batch * (ranks[-1] if kind == "strong" else count)
    return replace(recipe, global_batch_size=whole)


def run(bench: Bench, ranks: Sequence[int], kind: str, count: int, turn: int) -> dict[str, float]:
    """Train with `count` ranks; return tokens per second and the seconds of a step.

    Raises:
        RuntimeError: the run failed; the message ends with its last output.
    """
    folder = RunFolder(bench.folder / f"{kind}-{count}-{turn}")
    write_recipe(folder, recipe_of(bench, ranks, kind, count))
    environment = overhead.environment_of(replace(bench, ranks=count))
    environment |= {} if bench.gpus else {"OMP_NUM_THREADS": "1"}
    command = deepspeed_command(folder, count)
    done = children.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    timed = [row for row in read_jsonl(folder.metrics) if row["step"] >= overhead.WARM_UP]
    intervals = [{key: b[key] - a[key] for key in ("step", "seconds", "tokens")} for a, b in pairwise(timed)]
    last = timed[-1]
    return {
        "tokens_per_second": statistics.median(one["tokens"] / one["seconds"] for one in intervals),
        "peak_gib": last.get("gpu_peak_gib", last["host_peak_gib"]),
        "step_seconds": statistics.median(one["seconds"] / one["step"] for one in intervals),
    }


def predicted(bench: Bench, ranks: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return the efficiency of each number of ranks by the planner; none for a CPU that was not measured."""
    from .measure import config_of  # imports torch

    found: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        speeds = {}
        for count in ranks:
            recipe = recipe_of(bench, ranks, kind, count)
            if recipe.draft.enabled:
                model = replace(recipe.model, config=config_of(recipe, recipe.draft).to_dict())
                recipe = replace(recipe, model=model, draft=Draft())
            recipe = replace(recipe, deepspeed=f"zero{bench.zero_stage}.json")
            cluster = forecast.machines(count) if bench.gpus else forecast.cpu_ranks(count)
            if cluster is None:
                return {}
            shared = 1.0 if bench.gpus else min(1.0, len(os.sched_getaffinity(0)) / count)
            speeds[count] = shared * strategies.evaluate(strategies.plan_request(recipe, cluster), recipe).speed
        found[kind] = {str(count): speed / speeds[ranks[0]] for count, speed in speeds.items()}
    return found


def efficiencies(result: JsonView, kind: str) -> Iterator[tuple[int, float, float, float | None]]:
    """Yield ranks, tokens per second, efficiency and the planner's efficiency, or None if it has none."""
    speeds = {int(n): overhead.summarise(measured, "tokens_per_second") for n, measured in result["runs"][kind].items()}
    for count, speed in speeds.items():
        yield count, speed, speed / (count * speeds[1]), result["predicted"].get(kind, {}).get(str(count))


def table(result: JsonView) -> str:
    """Return the result as a Markdown table."""
    lines = ["| work | ranks | tokens/s | efficiency | by the planner |", "|---|---|---|---|---|"]
    for kind, what in KINDS.items():
        for count, speed, efficiency, predicted in efficiencies(result, kind):
            shared = f" on {result['cores']} cores" if crowded(result, count) else ""
            planned = "-" if predicted is None else f"{predicted:.0%}"
            lines.append(f"| {what} | {count}{shared} | {speed:,.0f} | {efficiency:.0%} | {planned} |")
    return "\n".join(lines)


def crowded(result: JsonView, count: int) -> bool:
    """Return whether `count` CPU ranks share cores."""
    return not result["environment"]["gpus"] and count > result["cores"]


def section(result: JsonView) -> str:
    """Return a result's table under a line with the measured setting, the hardware and the date."""
    settings, gpus = result["settings"], result["environment"]["gpus"]
    where = f"{len(gpus)} x {gpus[0]}" if gpus else f"{result['cores']} CPU cores, one thread per rank"
    rounds = len(result["runs"]["weak"]["1"])
    about = (
        f"ZeRO-{settings['zero_stage']}, {settings['micro_batch']} sequences of {settings['length']:,} tokens per rank "
        f"and pass, medians of {rounds} runs on {where}, {result['date']}:"
    )
    shared = [count for count in map(int, result["runs"]["weak"]) if crowded(result, count)]
    limits = (f"{count} ranks reach at most {result['cores'] / count:.0%}" for count in shared)
    note = f"\nMore ranks than cores share them: {', '.join(limits)}.\n" if shared else ""
    return f"{about}\n\n{table(result)}\n{note}"


def png(result: JsonView) -> bytes:
    """Return the figure: measured and predicted efficiency over the number of ranks."""
    from matplotlib.figure import Figure  # half a second, needed once
    from PIL import Image

    figure = Figure(figsize=(8, 3), layout="constrained")
    for axes, (kind, what) in zip(figure.subplots(1, 2, sharey=True), KINDS.items(), strict=True):
        ranks, _, measured, predicted = zip(*efficiencies(result, kind), strict=True)
        axes.plot(ranks, measured, marker="o", label="measured")
        if None not in predicted:
            axes.plot(ranks, predicted, marker="o", linestyle="--", label="by the planner")
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, list(map(str, ranks)))
        axes.set_ylim(0, 1.1)
        axes.set_title(f"{kind}: {what}", fontsize=10)
        axes.set_xlabel("ranks")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("efficiency")
    figure.axes[0].legend(frameon=False)
    drawn, image = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=110)
    # The figure is committed; a palette reduces its size to a quarter.
    Image.open(drawn).convert("RGB").quantize(COLOURS).save(image, format="png", optimize=True)
    return image.getvalue()
