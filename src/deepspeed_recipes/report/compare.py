"""Compares several runs: their results, the differences between their recipes, and their curves."""

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

from ..recipe.bounds import typed
from ..recipe.errors import UserError, redact
from .page import Block, Cell, Chart, Curve, Document, Note, Number, Section, Table
from .run_data import RunData
from .sections import curves, results, settings


def document(found: Sequence[RunData]) -> Document:
    """Return the comparison of at least two runs.

    Raises:
        UserError: the losses of two runs measure different things, or a run was named twice.
    """
    check(found)
    labels = names(found)
    folders = ((label, str(run.folder.path)) for label, run in zip(labels, found, strict=True))
    sections = (
        Section("Results", (*_held_out(found, labels), Table(("", *labels), tuple(_results(found))))),
        Section("Differences of the recipes", (_differences(found, labels),)),
        Section("Curves over steps", tuple(_charts(found, labels, "step", "step"))),
        Section("Curves over tokens", tuple(_charts(found, labels, "tokens", "token"))),
        Section("The runs", (Table(("", "run folder"), tuple(folders)),)),
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
        losses = [one.recipe.method.curve for one in (first, run)]
        if losses[0] != losses[1]:
            raise UserError(
                f"{first.folder.path} and {run.folder.path} cannot be compared: one shows {losses[0]}, the "
                f"other {losses[1]}; choose runs with the same loss."
            )


def names(found: Sequence[RunData]) -> list[str]:
    """Return short names for the runs: the shortest ends of their paths that are unique."""
    paths = [run.folder.path.resolve() for run in found]
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        ends = [str(Path(*path.parts[-length:])) for path in paths]
        if len(set(ends)) == len(ends):
            return ends
    return list(map(str, paths))


def _results(found: Sequence[RunData]) -> Iterator[tuple[Cell, ...]]:
    """Yield the table's rows, one cell per run: each number in the verdict of any of the runs."""
    yield "State", *(run.state for run in found)
    tables = [{str(label): measured for label, measured, _ in results.rows(run)} for run in found]
    for label in dict.fromkeys(label for table in tables for label in table):
        cells = ((run, table.get(label)) for run, table in zip(found, tables, strict=True))
        yield (
            label,
            *(
                Number(cell.value, cell.text, f"{run.folder.path}/{cell.source}") if isinstance(cell, Number) else cell
                for run, cell in cells
            ),
        )


def _held_out(found: Sequence[RunData], labels: Sequence[str]) -> Iterator[Note]:
    """Yield a warning if the runs were measured on different held-out examples."""
    sets: list[tuple[tuple[str, object], tuple[object, ...]]] = []
    keys = ("examples", "dropped", "tokens", "loss_tokens")
    for run in found:
        counts, data = run.data.get("held_out") or {}, run.recipe.data
        drawn = None if data.validation else (data.validation_share, run.recipe.seed)
        sets.append(((data.validation or data.path, drawn), tuple(counts.get(key) for key in keys)))
    if len({((PurePath(path).name, drawn), counts) for (path, drawn), counts in sets}) > 1:  # of any checkout
        each = (
            f"{label} {counts[0] or 'unknown'} of {redact(source)}"
            for label, ((source, _), counts) in zip(labels, sets, strict=True)
        )
        yield Note(f"The held-out examples differ, so the held-out scores do not compare: {'; '.join(each)}.")


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
    held_out = [curves.points(sorted(run.evaluations, key=lambda row: row["step"]), "loss", x) for run in found]
    if any(held_out):
        drawn = tuple(Curve(label, line, dotted=True) for label, line in zip(labels, held_out, strict=True))
        yield Chart("Held-out loss", x_label, drawn, log=packs).block()
