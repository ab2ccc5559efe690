"""The section with the newest result of `ds-recipes evaluate`: the run compared with other models."""

from collections.abc import Iterator, Mapping
from typing import Any

from ...recipe.methods.metrics import form, title
from ..document import Cell, Note, Section, Table, number
from ..run_data import RunData
from .verdict import UNITS

FILE = "evaluation.json"


def sections(run: RunData) -> Iterator[Section]:
    """Yield the section if the run was evaluated."""
    tasks = run.evaluation.get("tasks") or ()
    blocks = [*_blocks(run.evaluation, f"{FILE}:")]
    for at, task in enumerate(tasks):
        blocks += _blocks(task, f"{FILE}:tasks.{at}.")
    if blocks:
        yield Section("Evaluation", tuple(blocks))


def _blocks(found: Mapping[str, Any], place: str) -> Iterator[Any]:
    """Yield the blocks of one comparison; `place` is the source of its numbers."""
    models = [one for one in found.get("models") or () if isinstance(one, dict)]
    if not models:
        return
    metric = str(found.get("metric"))
    yield Note(f"{title(metric).capitalize()} on {found.get('examples')} examples of {found.get('data')}:")
    rows = tuple(_row(metric, f"{place}models.{at}", one) for at, one in enumerate(models))
    yield Table(("model", "score", "from", "to (95 % interval)"), rows)
    pairs = [one for one in found.get("pairs") or () if isinstance(one, dict)]
    if pairs:
        head = ("model", "compared with", "better on", "worse on", "p (exact paired test)")
        yield Table(head, tuple(_pair(f"{place}pairs.{at}", one) for at, one in enumerate(pairs)))


def _row(metric: str, place: str, one: dict[str, Any]) -> tuple[Cell, ...]:
    keys, unit = ("score", "low", "high"), UNITS.get(metric, "")
    return str(one.get("name")), *(number(one.get(key), form(metric), f"{place}.{key}", unit) for key in keys)


def _pair(place: str, one: dict[str, Any]) -> tuple[Cell, ...]:
    counts = (number(one.get(key), ",d", f"{place}.{key}") for key in ("better", "worse"))
    return str(one.get("second")), str(one.get("first")), *counts, number(one.get("p"), ".2g", f"{place}.p")
