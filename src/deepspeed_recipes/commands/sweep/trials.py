"""Runs a sweep's trials with the launcher, one after the other, and shows their results."""

import json
import math
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from ...machine import children, run_lock
from ...recipe.errors import UserError, redact
from ...recipe.files import Json
from ...recipe.methods import method
from ...recipe.methods.method import higher_is_better
from ...recipe.run_folder import RunFolder, checkpoints, is_finished, is_marked, read_json, read_jsonl, write_json

PLAN = "sweep.json"
"""The file with a sweep's definition, written before the first trial."""


@dataclass(frozen=True)
class Sweep:
    """All trials of a sweep; `sweep.json` in its folder has the same fields."""

    recipe: str
    variant: str
    options: tuple[str, ...]
    """The launcher's options for every trial."""
    fixed: tuple[str, ...]
    trials: tuple[tuple[str, ...], ...]
    """The overrides of each trial, in addition to `fixed`."""


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    trial: int
    overrides: tuple[str, ...]
    status: int
    """The launcher's exit status."""
    reason: str | None = None
    """Why the trial failed."""
    metric: str = "loss"
    """The metric of `score`: the run's metric on the held-out data, or the training loss without held-out data."""
    score: float | None = None
    held_out_loss: float | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    seconds: float | None = None
    held_out: str | None = None
    """A digest of the examples on which `score` was measured."""


def opened(folder: Path, sweep: Sweep) -> None:
    """Create a sweep's folder, or continue the sweep in it; a folder with anything else is refused."""
    plan = folder / PLAN
    if plan.exists():
        if read_json(plan) != json.loads(json.dumps(asdict(sweep))):
            raise UserError(f"--output-dir {folder} has another sweep; repeat the command that started it.")
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--output-dir {folder} exists and is not a sweep; choose a new or empty folder.")
    write_json(plan, asdict(sweep))


def folder_of(folder: Path, trial: int) -> RunFolder:
    """Return the run folder of a trial; trials are numbered from 1."""
    return RunFolder(folder / f"trial-{trial:03}")


def run(sweep: Sweep, folder: Path, trial: int, start: Callable[[Sequence[str], Path], int]) -> Result:
    """Run or resume a trial (counted from 1), unless it has finished, and return its result.

    `start` runs the launcher with the given words, writes its output to a file, and returns its exit status.
    """
    overrides, place = sweep.trials[trial - 1], folder_of(folder, trial)
    log = folder / f"{place.path.name}.log"
    if is_finished(place):
        return result(place, trial, overrides, 0, log)
    words = [sweep.recipe, sweep.variant, *sweep.options, "--output-dir", str(place.path)]
    if any(map(is_marked, checkpoints(place))):
        words.append("--resume")
    elif place.path.exists():  # it was interrupted before its first checkpoint
        run_lock.check(place.path)
        shutil.rmtree(place.path)
    return result(place, trial, overrides, start([*words, *sweep.fixed, *overrides], log), log)


def launch(words: Sequence[str], log: Path) -> int:
    """Run the launcher with its output in `log`, pass Ctrl-C on to it, and wait until it ends."""
    # Not -m: command.txt would begin with the path of a file that cannot be executed.
    code = (
        "import sys; sys.argv[0] = 'launch'; from deepspeed_recipes.commands.main import run; sys.exit(run('launch'))"
    )
    command = [sys.executable, "-c", code, *words]
    with log.open("w", encoding="utf-8") as output:
        with children.running(command, stdout=output, stderr=subprocess.STDOUT) as process:
            stopped = False
            while True:
                try:
                    status = process.wait()
                    break
                except KeyboardInterrupt:  # a second Ctrl-C ends the ranks immediately
                    stopped = True
                    process.send_signal(signal.SIGINT)
        if stopped:
            raise KeyboardInterrupt
        return status


def result(place: RunFolder, trial: int, overrides: tuple[str, ...], status: int, log: Path) -> Result:
    """Return a trial's row: its numbers if it has finished, otherwise the reason.

    That is the launcher's last line in `log`, without the launcher's name, or the last line of anything.
    """
    if not is_finished(place):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
        errors = [line for line in lines if line.startswith(("launch.py: ", "ds-recipes launch: "))]
        last = next((line for line in reversed(lines) if line.strip()), "no output")
        reason = errors[-1].partition(": ")[2] if errors else last
        return Result(trial, overrides, status or 1, redact(reason))
    summary: Json = read_json(place.summary)
    evaluations = read_jsonl(place.evaluations)
    held_out = [row["loss"] for row in evaluations if "loss" in row]
    judged = summary.get("after") is not None
    return Result(
        trial,
        overrides,
        0,
        metric=summary["metric"] if judged else "loss",
        score=summary["after"] if judged else summary["loss"],
        held_out_loss=held_out[-1] if held_out else None,
        loss=summary["loss"],
        tokens_per_second=summary["tokens_per_second"],
        seconds=summary["seconds"],
        held_out=evaluations[-1].get("held_out") if judged and evaluations else None,
    )


def ranked(results: Sequence[Result]) -> list[Result]:
    """Return the results, best first: by the mean over seeds, by score, then by held-out loss; failed trials last."""
    means = over_seeds(results)

    def cost(one: Result, score: float | None) -> float:
        if score is None or math.isnan(score):
            return math.inf
        return -score if higher_is_better(one.metric) else score

    def key(one: Result) -> tuple[bool, float, float, float, int]:
        mean = statistics.fmean(means.get(_settings(one), [math.nan]))
        loss = math.inf if one.held_out_loss is None else one.held_out_loss
        return one.status != 0, cost(one, mean), cost(one, one.score), loss, one.trial

    return sorted(results, key=key)


def judged_apart(results: Sequence[Result]) -> str | None:
    """Return a warning about scores of different metrics or examples, which do not compare, or None."""
    done = [one for one in results if not one.status]
    if len({one.metric for one in done}) > 1:
        return f"warning: the scores do not compare: they are {', '.join(sorted({one.metric for one in done}))}"
    if len({one.held_out for one in done}) > 1:
        return "warning: the scores do not compare: the trials were judged on different examples"
    return None


def _settings(one: Result) -> tuple[str, ...]:
    return tuple(word for word in one.overrides if not word.startswith("seed="))


def over_seeds(results: Sequence[Result]) -> dict[tuple[str, ...], list[float]]:
    """Return the scores of the trials that differ only by their seed, by their other settings."""
    scores: dict[tuple[str, ...], list[float]] = {}
    for one in results:
        if one.score is not None:
            scores.setdefault(_settings(one), []).append(one.score)
    return scores


def table(results: Sequence[Result], keys: Sequence[str]) -> Table:
    """Return the table of a sweep, best first; a failed trial is a row with its reason.

    Where several trials differ only by their seed, their first row has the mean and the standard deviation.
    """
    shown = Table("trial", *keys, highlight=False)
    found = ranked(results)
    metric = found[0].metric
    means = {settings: scores for settings, scores in over_seeds(results).items() if len(scores) > 1}
    same = all(one.score == one.held_out_loss for one in found)
    others = ("held-out loss", "training loss", "tokens/s", "seconds")[same:]
    heads = [method.title(metric), *(["mean over seeds"] if means else []), *others]
    for name in heads:
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("")
    for at, one in enumerate(found):
        values = dict(word.split("=", 1) for word in one.overrides)
        row = [str(one.trial), *(values[key] for key in keys)]
        if one.status:
            shown.add_row(*row, *("-" for _ in heads), f"status {one.status}: {one.reason}")
            continue
        row.append(score(one))
        if means:
            scores = means.get(_settings(one), [])
            if scores and _settings(one) not in map(_settings, found[:at]):
                mean, spread = (method.shown(metric, of(scores)) for of in (statistics.fmean, statistics.stdev))
                row.append(f"{mean} \N{PLUS-MINUS SIGN} {spread} ({len(scores)})")
            else:
                row.append("")
        given = ((one.held_out_loss, ".4f"), (one.loss, ".4f"), (one.tokens_per_second, ",.0f"), (one.seconds, ".0f"))
        numbers = ["-" if value is None else f"{value:{form}}" for value, form in given]
        shown.add_row(*row, *numbers[same:], "best" if at == 0 else "")
    return shown


def score(one: Result) -> str:
    """Return a result's score, formatted."""
    return "-" if one.score is None else method.shown(one.metric, one.score)


def draw(results: Sequence[Result], keys: Sequence[str], file: Path) -> bool:
    """Draw the score over each varied key; return False if no trial has a score."""
    done = [one for one in results if one.score is not None]
    if not done:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot  # most of a second, needed once

    figure, axes = pyplot.subplots(
        1, len(keys), figsize=(4.5 * len(keys), 4), layout="constrained", sharey=True, squeeze=False
    )
    best = ranked(done)[0]
    for axis, key in zip(axes.flat, keys, strict=True):
        values = [dict(word.split("=", 1) for word in one.overrides)[key] for one in done]
        places: list[float] | list[str] = values
        try:
            places = [float(value) for value in values]
            if min(places) > 0 and max(places) >= 5 * min(places):
                axis.set_xscale("log")
        except ValueError:
            pass  # words: matplotlib treats them as categories
        axis.plot(places, [one.score for one in done], "o", alpha=0.6)
        axis.plot(places[done.index(best)], best.score, "*", markersize=14, label=f"best: trial {best.trial}")
        axis.set_xlabel(key)
        axis.grid(alpha=0.3)
    direction = "higher" if method.higher_is_better(best.metric) else "lower"
    axes[0, 0].set_ylabel(f"{method.title(best.metric)} ({direction} is better)")
    axes[0, 0].legend()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    return True
