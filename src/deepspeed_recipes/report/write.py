"""Assembles the report of a run, or of several compared, from its sections; writes it, and the index of all runs."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from urllib.parse import quote

from ..recipe import files
from ..recipe.bounds import typed
from ..recipe.errors import UserError, first_line, printable, redact
from ..recipe.project import runs
from ..recipe.run_folder import RunFolder, comparable
from . import run_data
from .page import Block, Cell, Chart, Curve, Document, Link, Note, Number, Section, Table, number
from .run_data import RunData
from .sections import curves, examples, hardware, results, settings

FOLDER = Path(__file__).parent
INDEX = ("run", "state", "steps", "metric", "before", "after", "training loss", "tokens/s", "changed")


def document(run: RunData, texts: bool = True) -> Document:
    """Return the report of a run, starting with the verdict; `texts` are those of the data and the answers to them."""
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

    from . import charts

    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    environment.globals |= {"kind": lambda block: type(block).__name__.lower(), "svg": charts.svg}
    template = environment.get_template("page.html.jinja")
    return template.render(document=document, style=(FOLDER / "style.css").read_text(encoding="utf-8")).lstrip()


def html(path: Path, document: Document) -> None:
    """Write a report as HTML atomically, so that it is never incomplete, even if several runs end together."""
    files.write_text(path, render(document))


def page(run: RunFolder) -> Path:
    """Write a run's `report.html`, update the index if the run is in `runs/`, and return the report's path."""
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
    """Write the index of the runs `NAME/DATE/` in a folder, those with a recipe.json, the newest first; return it."""
    found = sorted(folder.glob("*/*/recipe.json"), key=lambda file: (file.parent.name, file.parent.parent.name))
    rows = tuple(tuple(_row(folder, file.parent)) for file in reversed(found))
    count = Note(f"{len(rows)} run{'' if len(rows) == 1 else 's'}, the newest first.")
    path = folder / "index.html"
    html(path, Document("Runs", str(folder), (Section("All runs", (count, Table(INDEX, rows))),)))
    return path


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
    page = settings.of_page(run.recipe)  # the differences from the page, as on the command line
    yield " ".join(f"{key}={new}" for key, _, new in settings.differences(page, run.recipe)) if page else ""


def comparison(found: Sequence[RunData]) -> Document:
    """Return the comparison of at least two different runs whose losses measure the same."""
    paths = [run.folder.path.resolve() for run in found]
    for at, path in enumerate(paths):
        if path in paths[:at]:
            raise UserError(f"{found[at].folder.path}: named twice; a comparison needs different runs.")
    first = found[0]
    for run in found[1:]:
        losses = [one.recipe.method.curve for one in (first, run)]
        if losses[0] != losses[1]:
            raise UserError(
                f"{first.folder.path} and {run.folder.path} cannot be compared: one shows {losses[0]}, the "
                f"other {losses[1]}; choose runs with the same loss."
            )
    # The shortest ends of the paths that are all different.
    lengths = range(1, max(len(path.parts) for path in paths) + 1)
    ends = ([str(Path(*path.parts[-length:])) for path in paths] for length in lengths)
    labels = next(names for names in ends if len(set(names)) == len(names))
    folders = ((label, str(run.folder.path)) for label, run in zip(labels, found, strict=True))
    # Each number in the verdict of any of the runs, with a cell per run.
    tables = [{str(label): measured for label, measured, _ in results.rows(run)} for run in found]
    rows: list[tuple[Cell, ...]] = [("State", *(run.state for run in found))]
    for label in dict.fromkeys(label for table in tables for label in table):
        cells = [table.get(label) for table in tables]
        for at, (run, cell) in enumerate(zip(found, cells, strict=True)):
            if isinstance(cell, Number):
                cells[at] = replace(cell, source=f"{run.folder.path}/{cell.source}")
        rows.append((label, *cells))
    # A warning if the runs were measured on different held-out examples.
    sets: list[tuple[tuple[str, object], tuple[object, ...]]] = []
    keys = ("examples", "dropped", "tokens", "loss_tokens")
    for run in found:
        counts, data = run.data.get("held_out") or {}, run.recipe.data
        drawn = None if data.validation else data.validation_share  # by a seed of its own
        sets.append(((data.validation or data.path, drawn), tuple(counts.get(key) for key in keys)))
    warnings = []
    if len({((PurePath(path).name, drawn), counts) for (path, drawn), counts in sets}) > 1:  # of any checkout
        each = (
            f"{label} {counts[0] or 'unknown'} of {redact(source)}"
            for label, ((source, _), counts) in zip(labels, sets, strict=True)
        )
        differ = "The held-out examples differ, so the held-out scores do not compare"
        warnings.append(Note(f"{differ}: {'; '.join(each)}."))
    sections = (
        Section("Results", (*warnings, Table(("", *labels), tuple(rows)))),
        Section("Differences of the recipes", (_differences(found, labels),)),
        Section("Curves over steps", tuple(_charts(found, labels, "step", "step"))),
        Section("Curves over tokens", tuple(_charts(found, labels, "tokens", "token"))),
        Section("The runs", (Table(("", "run folder"), tuple(folders)),)),
    )
    return Document(f"{len(found)} runs compared", ", ".join(labels), sections)


def _differences(found: Sequence[RunData], labels: Sequence[str]) -> Block:
    held = [settings.values(run.recipe) | {"recipe": run.recipe.name} for run in found]
    rows = [
        (key, *(redact(typed(values[key])) for values in held))
        for key in ["recipe", *settings.values(found[0].recipe)]
        if len({repr(values[key]) for values in held}) > 1
    ]
    for key in ("world_size", "git_commit"):
        shown = [typed(run.environment.get(key)) for run in found]
        if len(set(shown)) > 1:
            rows.append((key.replace("_", " "), *shown))
    return Table(("key", *labels), tuple(rows)) if rows else Note("Recipe, commit and number of ranks are the same.")


def _charts(found: Sequence[RunData], labels: Sequence[str], x: str, x_label: str) -> Iterator[Block]:
    """Yield the charts over one horizontal axis. Evaluations only record steps, so they have no chart over tokens."""
    packs = found[0].recipe.method.packs
    titles = {"loss": "Training loss", "grad_norm": "Gradient norm, before clipping"}
    titles |= {key: curves.TITLES[key] for key in ("learning_rate", "tokens_per_second")}
    for key, title in titles.items():
        lines = [curves.points(run.metrics, key, x) for run in found]
        smooth = (
            tuple(curves.smoothed(line)) if len(line) >= curves.SMOOTHED_FROM and key != "learning_rate" else line
            for line in lines
        )
        if any(lines):
            yield Chart(title, x_label, tuple(map(Curve, labels, smooth)), log=key == "loss" and packs).block()
    measured = [sorted(comparable(run.evaluations), key=lambda row: row["step"]) for run in found]
    held_out = [curves.points(rows, "loss", x) for rows in measured]
    if any(held_out):
        drawn = tuple(Curve(label, line, dotted=True) for label, line in zip(labels, held_out, strict=True))
        yield Chart("Held-out loss", x_label, drawn, log=packs).block()
