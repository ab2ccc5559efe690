"""The run folder: the paths of everything about one run, and which of its checkpoints are complete."""

import contextlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from . import files
from .conversions import from_dict, to_dict
from .errors import FileUnusable, UserError, cannot_write, of_system
from .project import runs
from .recipe import Recipe

COMPLETE = "complete.json"
"""Written into a checkpoint last, by rank 0 after every rank has finished; without it the checkpoint is incomplete."""

CHECK_FAILED = "check_failed.json"
"""Written into an export that computes other logits than the trained model; it never becomes the run's `export`."""

REWIND = 75
"""Exit status of ranks that rewind: the run should resume from its newest checkpoint (`EX_TEMPFAIL`: try again)."""


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run; nothing is created until it is needed."""

    path: Path

    @property
    def recipe(self) -> Path:
        """The recipe as it runs, including overrides."""
        return self.path / "recipe.json"

    @property
    def deepspeed(self) -> Path:
        """The DeepSpeed configuration that the engine got, with every value resolved."""
        return self.path / "deepspeed.json"

    @property
    def command(self) -> Path:
        """The command that started the run."""
        return self.path / "command.txt"

    @property
    def environment(self) -> Path:
        """Versions, hardware and git commit."""
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        """One JSON object per logged step."""
        return self.path / "metrics.jsonl"

    @property
    def system(self) -> Path:
        """How busy GPUs and nodes were: one JSON object per sample, with its time, node and rank."""
        return self.path / "system.jsonl"

    def system_of(self, rank: int | str) -> Path:
        """Return where another rank than 0 keeps its samples until training ends."""
        return self.ranks / f"rank-{rank}.system.jsonl"

    @property
    def evaluations(self) -> Path:
        """One JSON object per evaluation on the held-out data."""
        return self.path / "evaluations.jsonl"

    @property
    def evaluation(self) -> Path:
        """What `ds-recipes evaluate` has measured last: this run beside other models."""
        return self.path / "evaluation.json"

    @property
    def answers(self) -> Path:
        """Answers to a few held-out examples, before and after training; one JSON object per answer."""
        return self.path / "answers.jsonl"

    @property
    def rollouts(self) -> Path:
        """Of logged steps, the training answers with the highest and the lowest reward; one JSON object per answer."""
        return self.path / "rollouts.jsonl"

    @property
    def data(self) -> Path:
        """What the training data is: counts, lengths, and examples with their loss masks."""
        return self.path / "data.json"

    @property
    def reference(self) -> Path:
        """Log-likelihoods of each pair's answers before training, where they were computed once."""
        return self.path / "reference.json"

    @property
    def draft_model(self) -> Path:
        """The shrunken model that a draft trains."""
        return self.path / "draft_model"

    @property
    def likeliest(self) -> Path:
        """The likeliest next tokens of a teacher, computed before training."""
        return self.path / "likeliest"

    @property
    def checkpoints(self) -> Path:
        """Holds `checkpoint-STEP` folders, from which a run resumes."""
        return self.path / "checkpoints"

    @property
    def ranks(self) -> Path:
        """Holds each rank's output (`rank-N.log`), what it holds (`rank-N.json`), and its stack if the run hung."""
        return self.path / "ranks"

    @property
    def profile(self) -> Path:
        """Holds the traces of the steps that `--profile` recorded, by rank, and `verdict.json`."""
        return self.path / "profile"

    @property
    def restarts(self) -> Path:
        """One JSON object per restart: its cause, the step that it resumed from, and the number of ranks."""
        return self.path / "restarts.jsonl"

    @property
    def left_out(self) -> Path:
        """The examples, by number, that a rewind has found to be bad and that are skipped from then on."""
        return self.path / "left_out.json"

    @property
    def wandb_id(self) -> Path:
        """The run's id in W&B and the other trackers, where a run and its restarts are a single run."""
        return self.path / "wandb_id.txt"

    @property
    def tracking(self) -> Path:
        """Since when the trackers follow the run's newest start, and the status with which they were told it ended."""
        return self.path / "tracking.json"

    @property
    def export(self) -> Path:
        """The result: a Hugging Face folder, or an adapter."""
        return self.path / "export"

    @property
    def unverified(self) -> Path:
        """The export until it has been reloaded and computes the trained model's logits."""
        return self.path / "export.part"

    @property
    def report(self) -> Path:
        """Loss, learning rate, gradient norm and throughput over the steps."""
        return self.path / "report.png"

    @property
    def report_page(self) -> Path:
        """Everything that the run shows of itself, in one file."""
        return self.path / "report.html"

    @property
    def summary(self) -> Path:
        """The result; it exists once the run has ended."""
        return self.path / "summary.json"


def read_recipe(run: RunFolder) -> Recipe:
    """Return the recipe in a run folder.

    Raises:
        UserError: not a run folder, or its recipe.json cannot be read.
    """
    return from_dict(read_json(run.recipe))


def read_json(path: Path) -> Any:
    """Return a JSON file's content.

    Raises:
        FileUnusable: it cannot be read now.
        UserError: missing, or not JSON; names the line.
    """
    files.check_ends(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file.") from None
    except OSError as error:
        raise FileUnusable(of_system(error, path)) from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not JSON ({error.msg}).") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text.") from None
    except (ValueError, RecursionError) as error:  # a number with thousands of digits; lists in lists in lists
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).partition(";")[0]
        raise UserError(f"{path}: not JSON ({reason}).") from None


def write_json(path: Path, value: Any) -> None:
    """Write `value` whole: a reader sees the old file or the complete new one, after a power failure too."""
    files.write_text(path, json.dumps(value, indent=2) + "\n")


def new(recipe: Recipe, output_dir: Path | None) -> RunFolder:
    """Return the folder for a new run: `output_dir`, or a dated one in `runs/`.

    Raises:
        UserError: the folder has content that a new run would overwrite.
    """
    if output_dir is None:
        return at(runs() / recipe.name / datetime.now().strftime("%Y%m%d-%H%M%S"))
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
        raise UserError(f"{output_dir} already has a run of {held}; add --resume, or choose another --output-dir.")
    if used:
        raise UserError(f"{output_dir} exists and is not a run folder; choose a new or empty --output-dir.")
    return run


def at(path: Path) -> RunFolder:
    """Return the run folder; a line break in its name would be a line of scripts, logs and printed commands.

    Raises:
        UserError: names the folder.
    """
    files.check_name("--output-dir", path)
    return RunFolder(path)


def check_writable(run: RunFolder) -> None:
    """Refuse a run folder that could not be made or written to; leaves nothing behind.

    Raises:
        UserError: with the system's reason.
    """
    try:
        nearest = next(folder for folder in (run.path, *run.path.parents) if folder.exists())
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise _unusable(run.path, error) from error


def _unusable(path: Path, error: OSError) -> UserError:
    full = cannot_write(OSError(error.errno, error.strerror), path)  # the user knows the run folder, not a file in it
    return UserError(full or f"--output-dir {path}: cannot be written: {error.strerror}; choose another.")


def to_resume(recipe: Recipe, output_dir: Path | None) -> RunFolder:
    """Return the run to resume: the one in `output_dir`, or this recipe's newest.

    Raises:
        UserError: there is none, it is another recipe's, or it has no complete checkpoint.
    """
    if output_dir is None:
        found = sorted((runs() / recipe.name).glob("*/recipe.json"), reverse=True)
        # Pages of one name in different folders have runs of one name.
        same = (RunFolder(file.parent) for file in found if from_dict(read_json(file)).page == recipe.page)
        run = next(same, None)
        if run is None:
            raise UserError(f"nothing to resume: no run of {recipe.name} in {runs()}; add --output-dir.")
    else:
        run = at(output_dir.resolve())
        if not run.recipe.exists():
            raise UserError(f"nothing to resume: {output_dir} has no recipe.json, so it is not a run folder.")
    held = read_recipe(run).name
    if held != recipe.name:
        raise UserError(f"{run.path} has a run of {held}, not of {recipe.name}; choose another --output-dir.")
    if is_finished(run):
        raise UserError(f"nothing to resume: the run in {run.path} has finished; start a new one without --resume.")
    if newest_checkpoint(run) is None:
        raise UserError(f"nothing to resume: {run.checkpoints} has no complete checkpoint; start without --resume.")
    return run


def is_finished(run: RunFolder) -> bool:
    """Return whether the run has finished, and was not merely stopped.

    Raises:
        UserError: its summary is there and cannot be read.
    """
    try:
        run.summary.stat()
        return not read_json(run.summary).get("stopped")
    except FileNotFoundError:
        return False
    except OSError as error:
        raise FileUnusable(of_system(error, run.summary)) from error


@contextlib.contextmanager
def explained(place: Path) -> Iterator[None]:
    """Add what to do to an error of the system while checkpoints and logs are read or put in order.

    A checkpoint that cannot be read now, because a server or a disk does not answer or the files are another user's, is
    as complete as it was: nothing may be skipped, removed or started again from step 0 for it.

    Args:
        place: what is read, for errors that do not say which file it was.

    Raises:
        FileUnusable: the file, the error, and what to do.
    """
    try:
        yield
    except OSError as error:
        raise FileUnusable(
            f"{of_system(error, place)}\nNo complete checkpoint was touched: start the run again once that is put "
            "right, or move a checkpoint that stays unreadable elsewhere to resume from the one before it."
        ) from error


_CHECKPOINT = re.compile(r"checkpoint-(?:0|[1-9][0-9]*)")


def checkpoints(run: RunFolder) -> list[Path]:
    """Return the run's checkpoints, complete or not, the newest first: folders that are named `checkpoint-STEP`.

    Any other name belongs to the user: `checkpoint-9-backup`, for example.

    Raises:
        FileUnusable: they cannot be read now.
    """
    found = []
    with explained(run.checkpoints):
        try:
            names = os.listdir(run.checkpoints)
        except FileNotFoundError:
            if run.checkpoints.is_symlink():  # to a disk that is not mounted
                raise
            return []
        for name in filter(_CHECKPOINT.fullmatch, names):
            # A link that leads nowhere is an error: a checkpoint that was moved to another disk is not incomplete.
            if stat.S_ISDIR((run.checkpoints / name).stat().st_mode):
                found.append(run.checkpoints / name)
    return sorted(found, key=step_of, reverse=True)


def newest_checkpoint(run: RunFolder) -> Path | None:
    """Return the complete checkpoint of the highest step, or None.

    Raises:
        FileUnusable: that cannot be read now.
    """
    return next((one for one in checkpoints(run) if is_marked(one) and truncated(one) is None), None)


def is_marked(checkpoint: Path) -> bool:
    """Return whether every rank had finished writing a checkpoint.

    Raises:
        FileUnusable: that cannot be read now.
    """
    with explained(checkpoint):  # its folder is read, since a network file system may remember that a file is missing
        return COMPLETE in os.listdir(checkpoint)


def truncated(checkpoint: Path) -> str | None:
    """Return the name of a file of a marked checkpoint that is missing or has another size than was written, or None.

    A power failure or a full disk can truncate files that were already written, the one that says so too.
    `training/checkpoint/digests.py` compares their content.

    Raises:
        FileUnusable: a file cannot be read now.
    """
    try:
        written = dict(read_json(checkpoint / COMPLETE).get("files", {}))
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
        with path.open("rb") as file:  # opened, because a network file system may report an old size until then
            return os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return None


def checkpoint_bytes(total: int, trainable: int, bytes_per_weight: int) -> int:
    """Return the size of a checkpoint on disk, in bytes, for `total` and `trainable` parameters.

    The engine's states take 12 bytes per trainable parameter (fp32 weight and two Adam moments, measured for ZeRO 1
    to 3). The weights are written twice, as the engine's module state and in Hugging Face format. With adapters only
    the trainable part is written. A tenth is added for everything else.
    """
    weights = trainable if trainable < total else total
    return int(1.1 * (12 * trainable + 2 * bytes_per_weight * weights)) + 2**20


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step after which a checkpoint was written."""
    return int(checkpoint.name.rpartition("-")[2])


def forget_after(run: RunFolder, checkpoint: Path | None) -> None:
    """Remove what the lost steps have left: later and incomplete checkpoints, and the metrics after `checkpoint`.

    Args:
        run: the run.
        checkpoint: what the run resumes from, or None if it has no complete checkpoint and starts again.

    Raises:
        FileUnusable: something can be neither read nor removed; what is complete is still there.
        UserError: no checkpoint is there, and the run has written one.
    """
    last = step_of(checkpoint) if checkpoint else -1
    if checkpoint is None:
        _check_never_saved(run)
    for folder in checkpoints(run):
        if step_of(folder) > last or not is_marked(folder):
            with explained(folder):
                remove_checkpoint(folder)
    with explained(run.path):
        for log in filter(Path.exists, (run.metrics, run.evaluations, run.answers, run.rollouts)):
            if kept := [row for row in read_jsonl(log) if row["step"] <= last]:
                write_jsonl(log, kept)
            else:
                log.unlink()
        run.summary.unlink(missing_ok=True)


def _check_never_saved(run: RunFolder) -> None:
    """Refuse to start again from step 0 because a disk with the checkpoints is not mounted."""
    with explained(run.path):
        trained = max((row["step"] for row in read_jsonl(run.metrics)), default=0)
    every = read_recipe(run).save_steps if trained else 0
    if every and trained > every:
        raise UserError(
            f"{run.checkpoints} has no checkpoint, though the run has trained {trained} steps and saves every {every}; "
            f"is its disk mounted? To start again from step 0, remove {run.metrics}."
        )


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint, which does not count as complete from the first moment; of a link, only the link."""
    if folder.is_symlink():
        print(f"{folder}: removing this link; what it leads to, {folder.readlink()}, stays", flush=True)
        folder.unlink()
        return
    (folder / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(folder)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL log, without those that a kill or a power failure has cut off.

    What is cut off ends the file, or has the next start's first object behind it.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [_row(line) for line in lines if line.endswith("}\n")]


def _row(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        for start in re.finditer(r'(?<!^)\{"', line):
            with contextlib.suppress(ValueError):
                return json.loads(line[start.start() :])
        raise


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write a JSONL log anew, atomically."""
    files.write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def append_jsonl(path: Path, row: dict[str, Any]) -> None:
    """Append one object to a JSONL log."""
    with path.open("a", encoding="utf-8") as log:
        log.write(json.dumps(row) + "\n")


def write_recipe(run: RunFolder, recipe: Recipe) -> None:
    """Write `recipe.json`."""
    write_json(run.recipe, to_dict(recipe))
