"""Compares several runs: their results, the differences between their recipes, and their curves."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..recipe.errors import UserError, redact
from .document import Cell, Chart, Curve, Document, Note, Number, Section, Table
from .run_data import RunData
from .sections import curves, settings, verdict


def document(found: Sequence[RunData]) -> Document:
    """Return the comparison of at least two runs.

    Raises:
        UserError: the losses of two runs measure different things, or a run was named twice.
    """
    check(found)
    labels = names(found)
    sections = (
        Section("Results", (Table(("", *labels), tuple(_results(found))),)),
        Section("Differences of the recipes", tuple(_differences(found, labels))),
        Section("Curves over steps", tuple(_charts(found, labels, "step", "step"))),
        Section("Curves over tokens", tuple(_charts(found, labels, "tokens", "token"))),
        Section("The runs", (Table(("", "run folder"), tuple(zip(labels, _paths(found), strict=True))),)),
    )
    return Document(f"{len(found)} runs compared", ", ".join(labels), sections)


def check(found: Sequence[RunData]) -> None:
    """Refuse runs that cannot be compared.

    Raises:
        UserError: names both runs and the difference.
    """
    paths = [run.folder.path.resolve() for run in found]
    for at, path in enumerate(paths):
        if path in paths[:at]:
            raise UserError(f"{found[at].folder.path}: named twice; a comparison needs different runs.")
    first = found[0]
    for run in found[1:]:
        if _loss(run) != _loss(first):
            raise UserError(
                f"{first.folder.path} and {run.folder.path} cannot be compared: the first shows {_loss(first)}, "
                f"the other's {_loss(run)}."
            )


def _loss(run: RunData) -> str:
    return run.recipe.traits.loss


def names(found: Sequence[RunData]) -> list[str]:
    """Return short names for the runs: the shortest ends of their paths that are unique."""
    paths = [run.folder.path.resolve() for run in found]
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        ends = [str(Path(*path.parts[-length:])) for path in paths]
        if len(set(ends)) == len(ends):
            return ends
    return list(map(str, paths))


def _paths(found: Sequence[RunData]) -> list[str]:
    return [str(run.folder.path) for run in found]


def _results(found: Sequence[RunData]) -> Iterator[tuple[Cell, ...]]:
    """Yield a row for each number in the verdict of any run."""
    tables = [{label: measured for label, measured, _ in verdict.rows(run)} for run in found]
    yield "State", *("finished" if run.finished else "stopped" if run.summary else "not finished" for run in found)
    for label in dict.fromkeys(label for table in tables for label in table):
        yield label, *(_named(run, table.get(label)) for run, table in zip(found, tables, strict=True))


def _named(run: RunData, cell: Cell) -> Cell:
    """Return a number with its run folder added to the source."""
    return Number(cell.value, cell.text, f"{run.folder.path}/{cell.source}") if isinstance(cell, Number) else cell


def _differences(found: Sequence[RunData], labels: Sequence[str]) -> Iterator[Any]:
    held = [settings.values(run.recipe) | {"recipe": run.recipe.name} for run in found]
    rows = [
        (key, *(redact(settings.shown(values[key])) for values in held))
        for key in ["recipe", *settings.values(found[0].recipe)]
        if len({repr(values[key]) for values in held}) > 1
    ]
    for key in ("world_size", "git_commit"):
        shown = [settings.shown(run.environment.get(key)) for run in found]
        if len(set(shown)) > 1:
            rows.append((key.replace("_", " "), *shown))
    yield Table(("key", *labels), tuple(rows)) if rows else Note("Recipe, commit and number of ranks are the same.")


def _charts(found: Sequence[RunData], labels: Sequence[str], x: str, x_label: str) -> Iterator[Chart]:
    """Yield the charts over one horizontal axis. Evaluations only record steps, so they have no chart over tokens."""
    of_pairs = not found[0].recipe.traits.packs
    titles = {"loss": "Training loss", "grad_norm": "Gradient norm, before clipping"}
    titles |= {key: curves.TITLES[key] for key in ("learning_rate", "tokens_per_second")}
    for key, title in titles.items():
        lines = tuple(Curve(label, _line(run, key, x)) for run, label in zip(found, labels, strict=True))
        if any(line.points for line in lines):
            yield Chart(title, x_label, lines, log=key == "loss" and not of_pairs)
    held_out = tuple(
        Curve(label, curves.points(run.evaluations, "loss", x), dotted=True)
        for run, label in zip(found, labels, strict=True)
    )
    if any(line.points for line in held_out):
        yield Chart("Held-out loss", x_label, held_out, log=not of_pairs)


def _line(run: RunData, key: str, x: str) -> curves.Points:
    line = curves.points(run.metrics, key, x)
    return tuple(curves.smoothed(line)) if len(line) >= curves.SMOOTHED_FROM and key != "learning_rate" else line
