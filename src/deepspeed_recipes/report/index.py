"""Writes `runs/index.html`: all runs, the newest first."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from ..recipe.errors import UserError
from ..recipe.project import runs
from ..recipe.run_folder import RunFolder
from . import html, run_data
from .document import Cell, Document, Link, Note, Section, Table, number
from .run_data import RunData
from .sections import settings, verdict

HEAD = ("run", "state", "steps", "metric", "before", "after", "training loss", "tokens/s", "changed")


def update(run: RunFolder) -> None:
    """Write the index if this run is in `runs/`."""
    folder = runs()
    if run.path.resolve().is_relative_to(folder.resolve()):
        write(folder)


def write(folder: Path) -> Path:
    """Write the index of the runs `NAME/DATE/` in a folder, and return its path.

    Raises:
        OSError: the file cannot be written.
    """
    path = folder / "index.html"
    html.write(path, document(folder))
    return path


def document(folder: Path) -> Document:
    """Return a table of all runs with a recipe.json."""
    found = sorted(folder.glob("*/*/recipe.json"), key=lambda file: (file.parent.name, file.parent.parent.name))
    rows = tuple(_row(folder, file.parent) for file in reversed(found))
    count = Note(f"{len(rows)} run{'' if len(rows) == 1 else 's'}, the newest first.")
    return Document("Runs", str(folder), (Section("All runs", (count, Table(HEAD, rows))),))


def _row(folder: Path, path: Path) -> tuple[Cell, ...]:
    name = str(path.relative_to(folder))
    report = RunFolder(path).report_page
    shown: Cell = Link(name, quote(str(report.relative_to(folder)))) if report.exists() else name
    try:
        run = run_data.read(path)
    except (UserError, OSError) as error:
        return shown, str(error).removeprefix(f"{path}: "), *(None for _ in HEAD[2:])
    return shown, *_numbers(name, run)


def _numbers(name: str, run: RunData) -> Iterator[Cell]:
    last, at = run.metrics[-1], f"{name}/metrics.jsonl:{len(run.metrics)}"
    yield "finished" if run.finished else "stopped" if run.summary else "not finished"
    yield number(last["step"], ",d", f"{at}:step")
    yield from verdict.score(run)
    yield number(last.get("loss"), ".4f", f"{at}:loss")
    yield number(run.summary.get("tokens_per_second"), ",.0f", f"{name}/summary.json:tokens_per_second")
    yield settings.change_line(run.recipe)
