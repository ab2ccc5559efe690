"""Reads a run folder into frozen data."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..recipe.errors import UserError, redact
from ..recipe.files import JsonView
from ..recipe.recipe import Recipe
from ..recipe.run_folder import RunFolder, read_json, read_jsonl, read_recipe
from .page import Number, number

Row = JsonView
MOST_WARNINGS = 10
PROFILE = "profile/verdict.json"


@dataclass(frozen=True)
class RunData:
    """The content of a run folder; fields of missing files are empty."""

    folder: RunFolder
    recipe: Recipe
    metrics: tuple[Row, ...]
    """Logged steps: at least one row, each with a `step`."""
    evaluations: tuple[Row, ...]
    answers: tuple[Row, ...]
    """Answers to the same few held-out examples, before and after training."""
    restarts: tuple[Row, ...]
    summary: Row
    """Empty until the run has ended."""
    environment: Row
    deepspeed: Row
    data: Row
    """Description of the training data: counts, lengths, and examples with their loss masks."""
    evaluation: Row
    """The newest result of `ds-recipes evaluate`, if there is one."""
    ranks: tuple[Row, ...]
    """Tensors that each rank holds, by rank."""
    command: str
    rollouts: tuple[Row, ...] = ()
    """Training answers with the highest and the lowest reward of logged steps."""
    profile: Row = field(default_factory=dict)
    """The verdict on the steps that `--profile` recorded."""
    system: tuple[Row, ...] = ()
    """Utilisation of GPUs and nodes, in chronological order; each sample has a `time`, a `node` and a `rank`."""
    warnings: tuple[str, ...] = ()
    """The warnings that the run has printed, each once."""

    def number(self, source: str, form: str, unit: str = "") -> Number | None:
        """Return the number at a place in a JSON file, such as `summary.json:predicted.gpu_peak_gib`, as a cell."""
        file, _, keys = source.partition(":")
        found: Any = self.profile if file == PROFILE else getattr(self, file.removesuffix(".json"))
        for key in keys.split("."):
            found = found[int(key)] if isinstance(found, list) else (found or {}).get(key)
        return number(found, form, source, unit)

    def last(self, key: str, form: str, unit: str = "") -> Number | None:
        """Return a number of the last logged step, as a cell."""
        return number(self.metrics[-1].get(key), form, f"metrics.jsonl:{len(self.metrics)}:{key}", unit)

    @property
    def state(self) -> str:
        """The run has `finished`, was `stopped` early, or has `not finished`."""
        return "stopped" if self.summary.get("stopped") else "finished" if self.summary else "not finished"


def read(path: Path) -> RunData:
    """Return the content of the run folder at `path`."""
    run = RunFolder(path)
    if not path.is_dir():
        raise UserError(f"{path}: no such folder.")
    if not run.recipe.is_file():
        raise UserError(f"{path}: not a run folder, since it has no recipe.json.")
    metrics = rows(run.metrics)
    if not metrics:
        raise UserError(f"{path}: nothing to report: this run has not logged a step (no metrics.jsonl).")
    log = run.ranks / "rank-0.log"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    found = [line.strip() for line in (*lines, *str(_object(run.summary).get("warning") or "").splitlines())]
    # The samples of all ranks are in several files while a run trains, and after it failed.
    sampled = [row for path in (run.system, *run.ranks.glob(run.system_of("*").name)) for row in _objects(path)]
    known = [row for row in sampled if isinstance(row.get("time"), int | float) and isinstance(row.get("rank"), int)]
    return RunData(
        folder=run,
        recipe=read_recipe(run),
        metrics=metrics,
        evaluations=rows(run.evaluations),
        answers=rows(run.answers),
        rollouts=rows(run.rollouts),
        restarts=_objects(run.restarts),
        summary=_object(run.summary),
        environment=_object(run.environment),
        deepspeed=_object(run.deepspeed),
        data=_object(run.data),
        evaluation=_object(run.evaluation),
        ranks=tuple(_object(file) for file in sorted(run.ranks.glob("rank-*.json"), key=rank_of)),
        command=run.command.read_text(encoding="utf-8", errors="replace") if run.command.is_file() else "",
        profile=_object(run.path / PROFILE),
        system=tuple(sorted(known, key=lambda row: row["time"])),
        warnings=tuple(redact(line) for line in dict.fromkeys(found) if line.startswith("warning:"))[:MOST_WARNINGS],
    )


def rows(path: Path) -> tuple[Row, ...]:
    """Return the objects of a log, each of which has a `step`."""
    found = _objects(path)
    if not all(isinstance(row.get("step"), int) for row in found):
        raise UserError(f"{path}: a line without a step; was it written by a run?")
    return found


def _objects(path: Path) -> tuple[Row, ...]:
    return tuple(read_jsonl(path))


def _object(path: Path) -> Row:
    found = read_json(path) if path.is_file() else {}
    if not isinstance(found, dict):
        raise UserError(f"{path}: not a JSON object.")
    return found


def rank_of(file: Path) -> int:
    """Return the rank in the name of a rank's file, `rank-3.json`, by which such files are sorted; -1 without one."""
    digits = file.name.partition(".")[0].rpartition("-")[2]
    return int(digits) if digits.isdigit() else -1
