"""The run folder: the paths of a run's files, and the search for its complete checkpoints."""

import contextlib
import json
import math
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from . import files
from .conversions import from_dict, to_dict
from .errors import FileUnusable, NotJson, UserError, cannot_write, of_system
from .files import Json, JsonView
from .methods.method import higher_is_better
from .project import runs
from .recipe import Recipe

Row = TypeVar("Row", bound=JsonView)

COMPLETE = "complete.json"
"""Rank 0 writes this file last, after every rank has finished; a checkpoint without it is incomplete."""

CHECK_FAILED = "check_failed.json"
"""Marks an export whose logits differ from the trained model's; such an export never becomes the run's `export`."""

REWIND = 75
"""Exit status of ranks that rewind: the run should resume from its newest checkpoint (`EX_TEMPFAIL`: try again)."""
UNREADABLE = 74
"""Exit status of ranks that have named a file which the system refuses now (`EX_IOERR`); a restart may succeed."""


class Place:
    """A file or folder of a run, by its name in the run folder."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: "RunFolder", kind: type | None = None) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run; nothing is created until it is needed."""

    path: Path

    recipe = Place("recipe.json")
    """The recipe as it runs, including overrides."""
    requested = Place("recipe.requested.json")
    """The recipe of a resumed run until its first step is recorded; it then replaces recipe.json."""
    deepspeed = Place("deepspeed.json")
    """The DeepSpeed configuration that the engine got, with every value resolved."""
    command = Place("command.txt")
    """The command that started the run."""
    environment = Place("environment.json")
    """Versions, hardware and git commit."""
    metrics = Place("metrics.jsonl")
    """One JSON object per logged step."""
    system = Place("system.jsonl")
    """Utilization of GPUs and nodes: one JSON object per sample, with its time, node and rank."""
    evaluations = Place("evaluations.jsonl")
    """One JSON object per evaluation on the held-out data."""
    evaluation = Place("evaluation.json")
    """The latest results of `ds-recipes evaluate`: this run compared with other models.

    `earlier` marks results, and those of tasks, from before the run was resumed: they are another model's.
    """
    answers = Place("answers.jsonl")
    """Answers to a few held-out examples, before and after training; one JSON object per answer."""
    rollouts = Place("rollouts.jsonl")
    """The training answers with the highest and lowest reward of each logged step; one JSON object per answer."""
    data = Place("data.json")
    """A summary of the training data: counts, lengths, and examples with their loss masks."""
    reference = Place("reference.json")
    """Log-likelihoods of each pair's answers before training, if they were precomputed."""
    draft_model = Place("draft_model")
    """The shrunken model that a draft trains."""
    likeliest = Place("likeliest")
    """The likeliest next tokens of a teacher, computed before training."""
    checkpoints = Place("checkpoints")
    """The folder of the `checkpoint-STEP` folders, from which a run resumes."""
    ranks = Place("ranks")
    """The folder of each rank's output (`rank-N.log`), contents (`rank-N.json`), and stack if the run hung."""
    profile = Place("profile")
    """The folder of the traces that `--profile` recorded, by rank, and `verdict.json`."""
    restarts = Place("restarts.jsonl")
    """One JSON object per restart: its cause, the step from which it resumed, and the number of ranks."""
    left_out = Place("left_out.json")
    """The numbers of the examples that a rewind has found to be bad; the run skips them from then on."""
    wandb_id = Place("wandb_id.txt")
    """The run's id in W&B and the other trackers, which show a run and its restarts as a single run."""
    tracking = Place("tracking.json")
    """The time since which trackers follow the run's latest start, and the final status that they received."""
    export = Place("export")
    """The result: a Hugging Face folder, or an adapter."""
    results = Place("export/training/results.json")
    """The record in the export, with the number of steps that its weights were trained."""
    unverified = Place("export.part")
    """The export, until it has been reloaded and its logits match the trained model's."""
    report_page = Place("report.html")
    """The report with all charts and tables, in one HTML file."""
    summary = Place("summary.json")
    """The result, written at the end of the run."""

    def system_of(self, rank: int | str) -> Path:
        """Return the file in which a rank other than 0 keeps its samples until training ends."""
        return self.ranks / f"rank-{rank}.system.jsonl"


def read_recipe(run: RunFolder) -> Recipe:
    """Return the recipe in a run folder."""
    recipe: Recipe = from_dict(read_json(run.recipe))
    return recipe


def read_json(path: Path, *missing: object) -> Any:
    """Return a JSON file's content, or `missing` if that is given and there is no such file.

    FileUnusable if it cannot be read now, UserError if there is none, NotJson.
    """
    files.check_ends(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=files.unique)
    except FileNotFoundError:
        if missing:
            return missing[0]
        raise UserError(f"{path}: no such file.") from None
    except OSError as error:
        raise FileUnusable(of_system(error, path)) from error
    except json.JSONDecodeError as error:
        line = error.doc.splitlines()[error.lineno - 1 : error.lineno]
        comment = line and line[0].lstrip().startswith(("//", "#", "/*"))
        why = "a comment, which JSON does not have: remove it" if comment else error.msg
        raise NotJson(f"{path}:{error.lineno}: not JSON ({why}).") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text.") from None
    except (ValueError, RecursionError) as error:  # a number with thousands of digits; very deeply nested lists
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).partition(";")[0]
        raise NotJson(f"{path}: not JSON ({reason}).") from None


def write_json(path: Path, value: object) -> None:
    """Write `value` atomically: even after a power failure the file has either its old or its complete new content."""
    files.write_text(path, json.dumps(value, indent=2) + "\n")


def new(recipe: Recipe, output_dir: Path | None) -> RunFolder:
    """Return the folder for a new run: `output_dir`, or a dated one in `runs/`."""
    if output_dir is None:
        dated = at(runs() / recipe.name / datetime.now().strftime("%Y%m%d-%H%M%S")).path
        others = (dated.with_name(f"{dated.name}-{number}") for number in range(2, 1000))
        # In autumn an hour comes twice, and scripts start several runs in a second.
        return RunFolder(next(path for path in (dated, *others) if not path.exists()))
    run = at(output_dir.resolve())
    try:
        taken = run.recipe.exists()
        used = output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir()))
    except OSError as error:  # a folder that this user may not read
        raise _unusable(output_dir, error) from error
    if taken:
        held = read_recipe(run).name
        if held != recipe.name:
            raise UserError(f"{output_dir} has a run of {held}, not of {recipe.name}; choose another --output-dir.")
        if newest_checkpoint(run) is None:
            raise UserError(
                f"{output_dir} has a run of {held} without a complete checkpoint, which --resume cannot continue; "
                "choose another --output-dir, or remove the folder if you need nothing in it."
            )
        raise UserError(f"{output_dir} already has a run of {held}; add --resume, or choose another --output-dir.")
    if used:
        raise UserError(f"{output_dir} exists and is not a run folder; choose a new or empty --output-dir.")
    return run


def at(path: Path) -> RunFolder:
    """Return the run folder at `path`, refusing a line break in its name, which would add one to scripts and logs."""
    files.check_name("--output-dir", path)
    return RunFolder(path)


def check_writable(run: RunFolder) -> None:
    """Refuse a run folder that cannot be created or written to, with the system's reason; leaves nothing behind."""
    try:
        nearest = next(folder for folder in (run.path, *run.path.parents) if folder.exists())
        import tempfile  # which imports much, and a plan writes nothing

        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise _unusable(run.path, error) from error


def _unusable(path: Path, error: OSError) -> UserError:
    full = cannot_write(OSError(error.errno, error.strerror), path)  # names the run folder, not a temporary file in it
    return UserError(full or f"--output-dir {path}: cannot be written: {error.strerror}; choose another.")


def to_resume(recipe: Recipe, output_dir: Path | None) -> RunFolder:
    """Return the run to resume: the run in `output_dir`, or this recipe's newest; it needs a complete checkpoint."""
    if output_dir is None:
        found = [RunFolder(file.parent) for file in sorted((runs() / recipe.name).glob("*/recipe.json"))]
        # Pages with the same name in different folders have runs with the same name.
        run = max((one for one in found if read_recipe(one).page == recipe.page), key=_latest_start, default=None)
        if run is None:
            raise UserError(f"nothing to resume: no run of {recipe.name} in {runs()}; add --output-dir.")
    else:
        run = at(output_dir.resolve())
        if not run.recipe.exists():
            raise UserError(f"nothing to resume: {output_dir} has no recipe.json, so it is not a run folder.")
    held = read_recipe(run).name
    if held != recipe.name:
        raise UserError(f"{run.path} has a run of {held}, not of {recipe.name}; choose another --output-dir.")
    if newest_checkpoint(run) is None:
        anew = f", with another --output-dir or after removing {output_dir}" if output_dir else ""
        raise UserError(
            f"nothing to resume: {run.checkpoints} has no complete checkpoint; start without --resume{anew}."
        )
    return run


def _latest_start(run: RunFolder) -> datetime:
    """Return when a run's ranks last started, as recorded, or without a record when its recipe was written.

    A folder's name does not tell: the user may have chosen it, and `-10` follows `-9`.
    """
    with contextlib.suppress(UserError, AttributeError, KeyError, TypeError, ValueError):
        return datetime.fromisoformat(read_json(run.environment)["started"]).astimezone()
    return datetime.fromtimestamp(run.recipe.stat().st_mtime).astimezone()


def check_goes_on(run: RunFolder, recipe: Recipe) -> None:
    """Refuse to resume a finished run that the recipe does not make longer, and name settings that do."""
    if not has_ended(run):
        return
    checkpoint = newest_checkpoint(run)
    assert checkpoint, "see `to_resume`"
    before, trained = read_recipe(run), step_of(checkpoint)
    if recipe.max_steps is None:
        longer = before.max_steps is not None or recipe.epochs > before.epochs
    else:
        longer = recipe.max_steps > trained
        if before.max_steps == recipe.max_steps and recipe.epochs != before.epochs:
            raise UserError(
                f"epochs={recipe.epochs:g}: ignored, since the run has max_steps={recipe.max_steps}; use "
                f"max_steps={2 * trained}, or add max_steps=none."
            )
    ended = _summary(run).get("stopped_early")
    if ended and recipe.early_stopping == before.early_stopping:
        raise UserError(
            f"nothing to resume: the run in {run.path} stopped early {ended}; early_stopping="
            f"{2 * (before.early_stopping or 1)} or early_stopping=none continues it."
        )
    if not longer and not ended:
        more = f"max_steps={2 * trained}" if before.max_steps else f"epochs={before.epochs + 1:g}"
        raise UserError(f"nothing to resume: the run in {run.path} has finished its {trained} steps; add {more}.")


def is_finished(run: RunFolder) -> bool:
    """Return True if the run has finished, was not merely stopped, and is not about to continue with another recipe."""
    return has_ended(run) and not run.requested.exists()


def has_ended(run: RunFolder) -> bool:
    """Return True if the run's summary is that of an end, also while another recipe is about to continue the run."""
    return not _summary(run).get("stopped", True)


def _summary(run: RunFolder) -> Json:
    """Return the content of a run's summary, or an empty object if there is none."""
    try:
        found = read_json(run.summary, None)
    except FileUnusable:
        raise
    except UserError:
        found = []
    if found is None:
        return {}
    if isinstance(found, dict) and "stopped" in found:
        return found
    raise UserError(
        f"{run.summary}: not a run's summary; restore it, or remove it: the run then counts as not finished, and "
        "--resume trains what is left and exports it."
    )


@contextlib.contextmanager
def explained(place: Path) -> Iterator[None]:
    """Add the fix to system errors while checkpoints and logs are read or cleaned up, as FileUnusable.

    A checkpoint that cannot be read now, because a server or a disk does not answer or the files belong to another
    user, is still complete: nothing may be skipped or removed, and no run may start again from step 0, because of it.
    `place` is read, for errors that do not name the file.
    """
    try:
        yield
    except OSError as error:
        raise FileUnusable(
            f"{of_system(error, place)}\nNo complete checkpoint was changed: start the run again once this is fixed, "
            "or move an unreadable checkpoint elsewhere to resume from the previous checkpoint."
        ) from error


_CHECKPOINT = re.compile(r"checkpoint-(?:0|[1-9][0-9]*)")


def checkpoints(run: RunFolder) -> list[Path]:
    """Return the run's checkpoints, complete or not, newest first: folders that are named `checkpoint-STEP`.

    Folders with any other name, such as `checkpoint-9-backup`, belong to the user.
    """
    found = []
    with explained(run.checkpoints):
        try:
            names = os.listdir(run.checkpoints)
        except FileNotFoundError:
            if run.checkpoints.is_symlink():  # a link to a disk that is not mounted
                raise
            return []
        for name in filter(_CHECKPOINT.fullmatch, names):
            # A broken link is an error: a checkpoint that was moved to another disk is not incomplete.
            if stat.S_ISDIR((run.checkpoints / name).stat().st_mode):
                found.append(run.checkpoints / name)
    return sorted(found, key=step_of, reverse=True)


def newest_checkpoint(run: RunFolder) -> Path | None:
    """Return the complete checkpoint with the highest step, or None."""
    return next(complete_checkpoints(run), None)


def model_of(run: RunFolder) -> Path:
    """Return the folder of a run's model, its export or its newest complete checkpoint; say if the export is older.

    UserError if there is neither, or if the export failed its check.
    """
    if run.export.exists():
        newest, steps = None if is_finished(run) else newest_checkpoint(run), read_json(run.results, {}).get("steps")
        # Times of files say nothing about a copy; earlier versions recorded no steps.
        if newest and (
            newest.stat().st_mtime > run.export.stat().st_mtime if steps is None else step_of(newest) > steps
        ):
            print(f"warning: {run.export} is from before this run was resumed; newer: {newest}", file=sys.stderr)
        return run.export
    if (run.unverified / CHECK_FAILED).exists():
        raise UserError(
            f"{run.path}: the export of this run failed its check: after reloading, its logits differ from the trained "
            f"model's ({run.unverified / CHECK_FAILED}). Name a checkpoint instead."
        )
    newest = newest_checkpoint(run)
    if newest is None:
        raise UserError(f"{run.path}: this run has neither an export nor a complete checkpoint yet.")
    return newest


def complete_checkpoints(run: RunFolder) -> Iterator[Path]:
    """Yield the complete checkpoints, the newest first, each checked only when it is asked for."""
    return (one for one in checkpoints(run) if is_marked(one) and truncated(one) is None)


def judgements(run: RunFolder, recipe: Recipe) -> dict[int, tuple[float, float]]:
    """Return by step what decides about `early_stopping` and `keep_best`: the metric's value, and `for_ties`.

    Before the first step nothing is trained, and the evaluation of an export repeats an earlier one.
    """
    rows = [row for row in comparable(read_jsonl(run.evaluations)) if row["step"] and "exported" not in row]
    key = next((key for key in (f"sampled_{recipe.metric}", recipe.metric) if any(key in row for row in rows)), "loss")
    return {row["step"]: (row[key], for_ties(recipe, row)) for row in reversed(rows) if key in row}


def comparable(evaluations: Sequence[Row]) -> list[Row]:
    """Return the evaluations on the same held-out examples as the last one: a resumed run may have got others.

    Older versions did not record the examples' digest, `held_out`.
    """
    last = evaluations[-1].get("held_out") if evaluations else None
    return [row for row in evaluations if row.get("held_out", last) == last]


def for_ties(recipe: Recipe, evaluation: JsonView) -> float:
    """Return the number, lower is better, by which evaluations with equal metrics compare."""
    value = evaluation.get(recipe.tie_breaker, math.nan)
    return math.inf if math.isnan(value) else -value if higher_is_better(recipe.tie_breaker) else value


def best_step(recipe: Recipe, values: Mapping[int, tuple[float, float]]) -> int | None:
    """Return the first step with the best of `judgements`, or None if there is none."""
    sign = -1 if higher_is_better(recipe.metric) else 1
    return min(
        sorted(step for step in values if not math.isnan(values[step][0])),
        key=lambda step: (sign * values[step][0], values[step][1]),
        default=None,
    )


def best_checkpoint(run: RunFolder, recipe: Recipe) -> Path | None:
    """Return the complete checkpoint of the best evaluation among those that have one, or None."""
    found = {step_of(one): one for one in complete_checkpoints(run)}
    best = best_step(recipe, {step: value for step, value in judgements(run, recipe).items() if step in found})
    return None if best is None else found[best]


def is_marked(checkpoint: Path) -> bool:
    """Return True if every rank had finished writing a checkpoint."""
    with explained(checkpoint):  # lists the folder, since a network file system may cache that a file is missing
        return COMPLETE in os.listdir(checkpoint)


def truncated(checkpoint: Path) -> str | None:
    """Return the name of a file of a marked checkpoint that is missing or has the wrong size, or None.

    A power failure or a full disk can truncate files that were already written, including `complete.json` itself.
    `training/checkpoint/digests.py` compares their content.
    """
    try:
        complete = read_json(checkpoint / COMPLETE)
        written = dict(complete.get("files", {}))
        if not (isinstance(complete.get("layout"), dict) and isinstance(complete.get("world_size"), int)):
            return COMPLETE
    except FileUnusable:
        raise
    except (UserError, AttributeError, TypeError, ValueError):
        return COMPLETE
    with explained(checkpoint):
        return next((name for name, size in written.items() if _size(checkpoint / name) != size), None)


def sizes(checkpoint: Path) -> dict[str, int]:
    """Return the size of every file in a checkpoint, in bytes."""
    found = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    return {str(path.relative_to(checkpoint)): size for path in found if (size := _size(path)) is not None}


def _size(path: Path) -> int | None:
    try:
        with path.open("rb") as file:  # a network file system may report an old size until the file is opened
            return os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return None


def checkpoint_bytes(total: int, trainable: int, bytes_per_weight: int) -> int:
    """Return the size of a checkpoint on disk, in bytes, for `total` and `trainable` parameters.

    The engine's states take 12 bytes per trainable parameter (fp32 weight and two Adam moments, measured for ZeRO 1
    to 3). The weights are written twice, as the engine's module state and in Hugging Face format. With adapters, only
    the trainable part is written. The estimate adds a tenth for everything else.
    """
    weights = trainable if trainable < total else total
    return int(1.1 * (12 * trainable + 2 * bytes_per_weight * weights)) + 2**20


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step after which a checkpoint was written."""
    return int(checkpoint.name.rpartition("-")[2])


def forget_after(run: RunFolder, checkpoint: Path | None) -> None:
    """Remove the traces of lost steps: later and incomplete checkpoints, and the metrics after `checkpoint`.

    Without a checkpoint the run starts again, unless it has written one. As long as the ranks may still refuse to
    continue, the run keeps a copy of its summary, and of logs whose rows are removed: see `accept_recipe`. A file that
    can be neither read nor removed is a FileUnusable; complete checkpoints are kept.
    """
    last = step_of(checkpoint) if checkpoint else -1
    with explained(run.path):
        _restore_logs(run)
    if checkpoint is None:
        with explained(run.path):
            trained = max((row.get("step", 0) for row in read_jsonl(run.metrics)), default=0)
        every = read_recipe(run).save_steps if trained else 0
        if isinstance(every, str):  # "epoch"
            every = int(read_json(run.data)["save_steps"])
        if every and trained > every:
            raise UserError(
                f"{run.checkpoints} has no checkpoint, although the run has trained {trained} steps and saves every "
                f"{every}; is its disk mounted? To start again from step 0, remove {run.metrics}."
            )
    for folder in checkpoints(run):
        if step_of(folder) > last or not is_marked(folder):
            with explained(folder):
                if is_marked(folder) or not (folder / "trainer_state.json").exists():  # the Trainer's last file
                    print(f"{folder}: removed, as it is after step {last} or incomplete", flush=True)
                    remove_checkpoint(folder)
                else:
                    print(
                        f"{folder} has no {COMPLETE}, which is written last: skipping this checkpoint, which is now "
                        f"{set_aside(folder).name}; delete it if you do not need it",
                        file=sys.stderr,
                        flush=True,
                    )
    with explained(run.path):
        for log in filter(Path.exists, _logs(run)):
            kept = "".join(json.dumps(row) + "\n" for row in read_jsonl(log) if row.get("step", 0) <= last).encode()
            if (now := log.read_bytes()) != kept:
                files.write_bytes(_before(log), now)
                files.write_bytes(log, kept)
            if not kept:
                log.unlink()
        if run.summary.exists() and not (has_ended(run) and _summary(run).get("steps", -1) <= last):
            run.summary.replace(_before(run.summary))


def _logs(run: RunFolder) -> tuple[Path, ...]:
    return run.metrics, run.evaluations, run.answers, run.rollouts


def _before(log: Path) -> Path:
    return log.with_suffix(f".before{log.suffix}")


def _restore_logs(run: RunFolder) -> None:
    for log in (*_logs(run), run.summary):
        with contextlib.suppress(FileNotFoundError):
            _before(log).replace(log)


def set_aside(checkpoint: Path) -> Path:
    """Rename a checkpoint that cannot be used and return its new name: the run will write one of this step again."""
    free = (f"{checkpoint.name}-damaged{number}" for number in ("", *(f"-{count}" for count in range(2, 1000))))
    return checkpoint.rename(next(place for place in map(checkpoint.with_name, free) if not place.exists()))


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint, starting with the file that marks it as complete; of a link, remove only the link."""
    if folder.is_symlink():
        print(f"{folder}: removing this link; its target {folder.readlink()} stays", flush=True)
        folder.unlink()
        return
    (folder / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(folder)


def read_jsonl(path: Path) -> list[Json]:
    """Return the objects of a JSONL log, without objects that a kill or a power failure has truncated.

    A truncated object is at the end of the file, or directly before the first object of the next start. NotJson names
    any other line that is none.
    """
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True) if path.exists() else (), 1):
        if line.endswith(b"}\n"):
            starts = [0, *(start.start() for start in re.finditer(rb'(?<!^)\{"', line))]
            for start in starts:
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line[start:].decode()))
                    break
            else:
                raise NotJson(f"{path}:{number}: not a JSON object; correct that line, or remove it.")
    return found


def write_jsonl(path: Path, rows: Iterable[Json]) -> None:
    """Replace a JSONL log atomically."""
    files.write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def append_jsonl(path: Path, row: Json) -> None:
    """Append one object to a JSONL log."""
    with path.open("a", encoding="utf-8") as log:
        log.write(json.dumps(row) + "\n")


def write_recipe(run: RunFolder, recipe: Recipe) -> None:
    """Write the recipe of the next start: `recipe.json`, or the requested one, next to that of an earlier start."""
    write_requested(run.recipe, to_dict(recipe))


def write_requested(path: Path, value: object) -> None:
    """Write a record of this start: to `path`, or next to an earlier start's until a step is recorded."""
    write_json(_requested(path) if path.exists() else path, value)


def _requested(path: Path) -> Path:
    return path.with_suffix(".requested.json")


def starting_recipe(run: RunFolder) -> Recipe:
    """Return the recipe with which ranks start: the requested one if there is one."""
    recipe: Recipe = from_dict(read_json(run.requested if run.requested.exists() else run.recipe))
    return recipe


def accept_recipe(run: RunFolder) -> None:
    """Replace the recipe and the records of an earlier start by this start's, and remove the summary of its end.

    This is done before a step is recorded: ranks that refuse the recipe, or fail earlier, leave the run as it was.
    """
    resumed = run.requested.exists()
    run.summary.unlink(missing_ok=True)
    for path in (run.data, run.deepspeed, run.environment, run.recipe):
        with contextlib.suppress(FileNotFoundError):
            _requested(path).replace(path)
    for log in (*_logs(run), run.summary):
        _before(log).unlink(missing_ok=True)
    with contextlib.suppress(UserError):  # a damaged one is named by the report
        found = read_json(run.evaluation, None)
        if resumed and isinstance(found, dict):
            for one in (found, *(found.get("tasks") or ())):
                one["earlier"] = True
            write_json(run.evaluation, found)


def discard_requested(run: RunFolder, recipe: bool = True) -> None:
    """Remove what `accept_recipe` has not accepted, with or without the recipe; restore the logs' rows."""
    _restore_logs(run)
    for path in (run.data, run.deepspeed, run.environment, *([run.recipe] if recipe else [])):
        _requested(path).unlink(missing_ok=True)
