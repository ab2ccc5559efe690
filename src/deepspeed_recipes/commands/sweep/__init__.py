"""Run a recipe with several settings, one trial after the other, and compare them.

    ds-recipes sweep tiny lora learning_rate=1e-4,3e-4,1e-3 lora.rank=8,16
    ds-recipes sweep llama3-8b lora --draft max_steps=50 learning_rate=1e-5..1e-3 --random 12 --seed 1
    ds-recipes sweep tiny full learning_rate=1e-4,3e-4 --output-dir runs/sweeps/mine      # again: continues it

A key with several values, separated by commas, is varied; a key with one value is the same in all trials. The grid has
every combination; --random N draws N of them, and also accepts ranges of numbers (1e-5..1e-3, drawn uniformly on a log
scale). Separate the values with semicolons if they may contain commas, as those of data.path do.

Every trial is a run in the sweep's folder with its own report; in the trackers all trials are one group. The sweep ends
with one table, in the terminal, in results.json and in sweep.png; a failed trial is a row with its reason. The same
command with the same --output-dir continues a sweep: trials that have finished are not run again.

Exit status: 0; 1 if a trial failed; 2 for a mistake on the command line; 130 after Ctrl-C.
"""

import argparse
import itertools
import json
import math
import random
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console

from ...launching import restarts
from ...launching.command import rank_count
from ...recipe import overrides, pages, run_folder
from ...recipe.errors import UserError, redact
from ...recipe.methods import method
from ...recipe.project import command, display, runs
from ...recipe.run_folder import write_json
from ..launch import borrowed
from ..launch.options import AUTO, auto_words
from ..main import Parser, check_least
from . import trials
from .trials import Result, Sweep

MOST = 64
"""Default for --most: the largest number of trials."""
WIDTH = 160
"""Width of the table in characters, without a terminal."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials, show the table, and return the exit status."""
    options = parse(arguments)
    launched = [f"--{name.replace('_', '-')}" for name in ("draft", "no_plan") if getattr(options, name)]
    for name in ("gpus", "max_restarts"):
        if (value := getattr(options, name)) is not None:
            launched += [f"--{name.replace('_', '-')}", str(value)]
    if options.recipe == AUTO:
        options.variant, variant, options.overrides = auto_words([options.variant, *options.overrides])
        page, launched = borrowed.borrow(options.variant, variant), [variant, *launched]
    else:
        page = pages.find(options.recipe, options.variant)
    found = read_space(options.overrides)
    overrides.apply(page, found.fixed)
    check_least(options, most=2)
    if options.gpus is not None:
        rank_count(options.gpus, 0)  # trials that need more than there are fail by themselves
    if options.max_restarts is not None:
        restarts.check(page, options.max_restarts)
    if options.seed is not None and options.random is None:
        raise UserError(f"--seed {options.seed}: only with --random N; a grid uses no seed.")
    chosen = (
        grid(found, options.most)
        if options.random is None
        else at_random(found, options.random, options.seed or 0, options.most)
    )
    for trial in chosen:
        overrides.apply(page, [*found.fixed, *trial])
    name = f"{page.name}-{datetime.now():%Y%m%d-%H%M%S}"
    folder = run_folder.at((options.output_dir or runs() / "sweeps" / name).resolve()).path
    group = [f"wandb.group={folder.name}", "wandb.job_type=sweep"]
    set_there = overrides.keys_of(options.overrides)
    fixed = (*found.fixed, *(word for word in group if word.partition("=")[0] not in set_there))
    sweep = Sweep(options.recipe, options.variant, tuple(launched), fixed, tuple(map(tuple, chosen)))
    if options.dry_run:
        print(f"{len(chosen)} trials, which would be in {display(folder)}:")
        for one in sweep.trials:
            print(command("launch"), shlex.join([sweep.recipe, sweep.variant, *sweep.options, *found.fixed, *one]))
        return 0
    trials.opened(folder, sweep)
    return run(sweep, folder, found.keys, options.json)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; options and key=value may come in any order."""
    parser = Parser("sweep", __doc__)
    parser.add_argument("recipe", metavar="RECIPE[-SIZE]", help="as in ds-recipes launch; `auto MODEL` too")
    parser.add_argument("variant", metavar="VARIANT", help="as in ds-recipes launch")
    parser.add_argument(
        "overrides", nargs="*", type=overrides.word, metavar="key=value[,value]", help="keys to set and to vary"
    )
    parser.add_argument("--random", type=int, metavar="N", help="N random trials instead of every combination")
    parser.add_argument("--seed", type=int, metavar="S", help="seed of --random (default: 0)")
    parser.add_argument(
        "--most", type=int, default=MOST, metavar="N", help=f"largest number of trials (default: {MOST})"
    )
    parser.add_argument("--output-dir", type=Path, metavar="D", help="the sweep's folder (default: in runs/sweeps/)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--dry-run", action="store_true", help="print the trials; write and start nothing")
    parser.add_argument("--draft", action="store_true", help="as in ds-recipes launch: a shrunken, random model")
    parser.add_argument("--gpus", type=int, metavar="N", help="as in ds-recipes launch: ranks per trial")
    parser.add_argument("--no-plan", action="store_true", help="as in ds-recipes launch")
    parser.add_argument("--max-restarts", type=int, metavar="N", help="as in ds-recipes launch")
    return parser.parse_intermixed_args(arguments)


def run(sweep: Sweep, folder: Path, keys: Sequence[str], as_json: bool) -> int:
    """Run the trials that have not finished, print the results, and return the exit status."""
    out = sys.stderr if as_json else sys.stdout
    count = len(sweep.trials)
    print(f"{count} trials of {sweep.recipe} {sweep.variant} in {display(folder)}", file=out, flush=True)
    results: list[Result] = []
    interrupted = False
    for trial in range(1, count + 1):
        known = run_folder.is_finished(trials.folder_of(folder, trial))
        try:
            one = trials.run(sweep, folder, trial, trials.launch)
        except KeyboardInterrupt:
            interrupted = True
            break
        results.append(one)
        end = f"status {one.status}: {one.reason}" if one.status else f"{method.title(one.metric)} {trials.score(one)}"
        before = "  (finished before)" if known else ""
        print(f"trial {trial}/{count}  {' '.join(one.overrides)}  {end}{before}", file=out, flush=True)
    show(results, keys, folder, as_json)
    if interrupted:
        print(f"stopped; the same command with --output-dir {display(folder)} continues it", file=out, flush=True)
        return 130
    return 1 if any(one.status for one in results) else 0


def show(results: Sequence[Result], keys: Sequence[str], folder: Path, as_json: bool) -> None:
    """Write results.json and sweep.png, and print the table."""
    if not results:
        return
    rows = [asdict(one) | {"run": str(trials.folder_of(folder, one.trial).path)} for one in trials.ranked(results)]
    write_json(folder / "results.json", rows)
    drawn = trials.draw(results, keys, folder / "sweep.png")
    if apart := trials.judged_apart(results):
        print(apart, file=sys.stderr)
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH).print(trials.table(results, keys))
    if drawn:
        print(f"plot         {display(folder / 'sweep.png')}")
    best = trials.ranked(results)[0]
    if not best.status:
        print(f"best         {command('report')} {display(trials.folder_of(folder, best.trial).path)}")


@dataclass(frozen=True)
class Space:
    """The varied keys, and the settings that all trials share."""

    lists: dict[str, tuple[str, ...]]
    """Values by key, as typed; at least two each."""
    ranges: dict[str, tuple[str, str]]
    """Lowest and highest value by key, for random trials."""
    fixed: tuple[str, ...]
    """`key=value` words that all trials share."""

    @property
    def keys(self) -> list[str]:
        """The keys that differ between trials."""
        return [*self.lists, *self.ranges]


def read_space(words: Sequence[str]) -> Space:
    """Return the space that `key=value`, `key=value,value` and `key=lowest..highest` describe."""
    known, with_commas = overrides.override_keys(), overrides.comma_keys()
    lists: dict[str, tuple[str, ...]] = {}
    ranges: dict[str, tuple[str, str]] = {}
    fixed: list[str] = []
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise UserError(
                f"{redact(word)!r} is not an override; write key=value,value, e.g. learning_rate=1e-4,3e-4."
            )
        if key not in known:
            raise UserError(overrides.unknown(key, list(known)))
        if key in lists or key in ranges or any(one.startswith(f"{key}=") for one in fixed):
            raise UserError(f"{key} is given twice; list all its values at once: {key}=VALUE,VALUE.")
        lowest, dots, highest = text.partition("..")
        comma = ";" if key in with_commas else ","
        if dots and _is_number(lowest) and _is_number(highest):
            low, high = (overrides.parse(key, end, known[key]) for end in (lowest, highest))
            if not isinstance(low, int | float) or isinstance(low, bool) or low >= high:
                raise UserError(f"{key}={lowest}..{highest}: a range goes from a lower to a higher number.")
            ranges[key] = lowest, highest
        elif comma in text:
            values = tuple(value.strip() for value in text.split(comma) if value.strip())
            parsed = [overrides.parse(key, value, known[key]) for value in values]
            if len(values) < 2:
                raise UserError(
                    f"{key}={redact(text)}: has only one value; list at least two, or leave the {comma!r} out."
                )
            if twice := next((values[at] for at, value in enumerate(parsed) if value in parsed[:at]), None):
                raise UserError(f"{key}={redact(text)}: {twice} is listed twice.")
            lists[key] = values
        else:
            overrides.parse(key, text, known[key])
            fixed.append(word)
    if not lists and not ranges:
        raise UserError("nothing to sweep over: list the values of a key, e.g. learning_rate=1e-4,3e-4,1e-3.")
    return Space(lists, ranges, tuple(fixed))


def grid(space: Space, most: int) -> list[list[str]]:
    """Return the overrides of every combination, at most `most`, in the order of the values, without ranges."""
    if space.ranges:
        key, (low, high) = next(iter(space.ranges.items()))
        raise UserError(f"{key}={low}..{high}: a range needs --random N; a grid needs a list of values.")
    count = math.prod(map(len, space.lists.values()))
    if count > most:
        sizes = " x ".join(f"{len(values)} of {key}" for key, values in space.lists.items())
        raise UserError(
            f"{count} trials ({sizes}) are more than {most}: list fewer values, try some with --random {most}, or "
            f"allow all with --most {count}."
        )
    pairs = [[f"{key}={value}" for value in values] for key, values in space.lists.items()]
    return [list(trial) for trial in itertools.product(*pairs)]


def at_random(space: Space, count: int, seed: int, most: int) -> list[list[str]]:
    """Return `count` different combinations, the same for the same seed.

    Values from a range above 0 are uniform on a log scale, since learning rates differ by factors. Whole numbers stay
    whole. Refuses a `count` below two, above `most`, or above the number of different combinations.
    """
    if count < 2:
        raise UserError(f"--random {count}: must be at least 2.")
    if count > most:
        raise UserError(f"--random {count}: more than {most} trials; allow them with --most {count}.")
    found: dict[tuple[str, ...], None] = {}
    chance = random.Random(seed)
    for _ in range(100 * count):
        trial = [f"{key}={chance.choice(values)}" for key, values in space.lists.items()]
        for key, ends in space.ranges.items():
            low, high = map(float, ends)
            value = math.exp(chance.uniform(math.log(low), math.log(high))) if low > 0 else chance.uniform(low, high)
            trial.append(f"{key}={round(value) if all(end.isdigit() for end in ends) else format(value, '.3g')}")
        found[tuple(trial)] = None
        if len(found) == count:
            return [list(trial) for trial in found]
    raise UserError(
        f"--random {count}: there are only {len(found)} different trials; list more values, or use --random "
        f"{max(2, len(found))}."
    )


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
