"""What `evaluate.py` has measured last: the run beside other models."""

from collections.abc import Iterator
from typing import Any

from ..document import Cell, Note, Section, Table, number
from ..run_data import RunData
from .verdict import FORMS

FILE = "evaluation.json"


def sections(run: RunData) -> Iterator[Section]:
    """Yield the section, where there is something to show."""
    found = run.evaluation
    models = [one for one in found.get("models") or () if isinstance(one, dict)]
    if not models:
        return
    metric = str(found.get("metric"))
    about = Note(f"{metric.replace('_', ' ').capitalize()} on {found.get('examples')} examples of {found.get('data')}:")
    rows = tuple(_row(metric, at, one) for at, one in enumerate(models))
    blocks: list[Any] = [about, Table(("model", "score", "from", "to (95 % interval)"), rows)]
    pairs = [one for one in found.get("pairs") or () if isinstance(one, dict)]
    if pairs:
        head = ("model", "compared with", "better on", "worse on", "p (exact paired test)")
        blocks.append(Table(head, tuple(_pair(at, one) for at, one in enumerate(pairs))))
    yield Section("Evaluation", tuple(blocks))


def _row(metric: str, at: int, one: dict[str, Any]) -> tuple[Cell, ...]:
    form, unit = FORMS.get(metric, (".4g", ""))
    keys = ("score", "low", "high")
    return str(one.get("name")), *(number(one.get(key), form, f"{FILE}:models.{at}.{key}", unit) for key in keys)


def _pair(at: int, one: dict[str, Any]) -> tuple[Cell, ...]:
    counts = (number(one.get(key), ",d", f"{FILE}:pairs.{at}.{key}") for key in ("better", "worse"))
    return str(one.get("second")), str(one.get("first")), *counts, number(one.get("p"), ".2g", f"{FILE}:pairs.{at}.p")
