"""Assembles the report of a run from its sections, and writes it and the index of all runs when the run ends."""

import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from ..recipe import files
from ..recipe.errors import UserError, first_line, printable
from ..recipe.project import runs
from ..recipe.run_folder import RunFolder
from . import run_data
from .page import Cell, Chart, Document, Link, Note, Section, Table, number
from .run_data import RunData
from .sections import curves, examples, hardware, results, settings

FOLDER = Path(__file__).parent
INDEX = ("run", "state", "steps", "metric", "before", "after", "training loss", "tokens/s", "changed")


def document(run: RunData, texts: bool = True) -> Document:
    """Return the report of a run, starting with the verdict.

    Args:
        run: the content of its folder.
        texts: whether to include texts of the data and answers to them.
    """
    sections = (
        results.verdict(run),
        *((examples.answers(run),) if texts else ()),
        curves.section(run),
        *((hardware.recorded_steps(run),) if run.profile else ()),
        *curves.layer_sections(run),
        hardware.memory(run),
        hardware.tensors(run),
        *hardware.in_use(run),
        *results.evaluation(run),
        *((*examples.rollouts(run), examples.data(run)) if texts else ()),
        settings.recipe(run),
        settings.deepspeed(run),
        settings.versions(run),
        settings.restarts(run),
    )
    return Document(run.recipe.name, str(run.folder.path), sections)


def render(document: Document) -> str:
    """Return the report as one HTML file, which needs neither network nor scripts.

    All content of a run folder is treated as text: the template escapes every value, and control characters are
    spelled out.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    environment.globals |= {"kind": lambda block: type(block).__name__.lower(), "svgs": svgs}
    template = environment.get_template("page.html.jinja")
    return template.render(document=document, style=(FOLDER / "style.css").read_text(encoding="utf-8")).lstrip()


def svgs(chart: Chart, name: str) -> Iterator[tuple[str, object]]:
    """Yield (name of the axis, SVG) for a chart: linear, and logarithmic if the chart offers it."""
    from markupsafe import Markup

    from . import charts

    for axis in ("linear", "log") if chart.log else ("linear",):
        yield axis, Markup(charts.svg(chart, f"{name}-{axis}", axis == "log"))


def html(path: Path, document: Document) -> None:
    """Write a report as HTML atomically, so that it is never incomplete, even if several runs end together.

    Raises:
        OSError: the file cannot be written.
    """
    files.write_text(path, render(document))


def page(run: RunFolder) -> Path:
    """Write a run's `report.html`, update the index if the run is in `runs/`, and return the report's path.

    Raises:
        UserError: the folder is not a run folder, or has nothing to report.
        OSError: the folder cannot be written to.
    """
    html(run.report_page, document(run_data.read(run.path)))
    if run.path.resolve().is_relative_to(runs().resolve()):
        index(runs())
    return run.report_page


def at_end(run: RunFolder) -> None:
    """Write the report of a run that has finished, stopped or failed; errors are only printed."""
    if not run.metrics.exists():
        return
    try:
        page(run)
    except Exception as error:
        print(f"{run.report_page} could not be written: {type(error).__name__}: {first_line(error)}", file=sys.stderr)


def index(folder: Path) -> Path:
    """Write the index of the runs `NAME/DATE/` in a folder, the newest first, and return its path.

    Raises:
        OSError: the file cannot be written.
    """
    path = folder / "index.html"
    html(path, listing(folder))
    return path


def listing(folder: Path) -> Document:
    """Return a table of all runs with a recipe.json."""
    found = sorted(folder.glob("*/*/recipe.json"), key=lambda file: (file.parent.name, file.parent.parent.name))
    rows = tuple(tuple(_row(folder, file.parent)) for file in reversed(found))
    count = Note(f"{len(rows)} run{'' if len(rows) == 1 else 's'}, the newest first.")
    return Document("Runs", str(folder), (Section("All runs", (count, Table(INDEX, rows))),))


def _row(folder: Path, path: Path) -> Iterator[Cell]:
    name = str(path.relative_to(folder))
    report = RunFolder(path).report_page
    yield Link(name, quote(str(report.relative_to(folder)))) if report.exists() else name
    try:
        run = run_data.read(path)
    except (UserError, OSError) as error:
        yield str(error).removeprefix(f"{path}: ")
        yield from (None for _ in INDEX[2:])
        return
    last, at = run.metrics[-1], f"{name}/metrics.jsonl:{len(run.metrics)}"
    yield run.state
    yield number(last["step"], ",d", f"{at}:step")
    yield from results.score(run)
    yield number(last.get("loss"), ".4f", f"{at}:loss")
    yield number(run.summary.get("tokens_per_second"), ",.0f", f"{name}/summary.json:tokens_per_second")
    yield settings.change_line(run.recipe)
