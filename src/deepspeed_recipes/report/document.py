"""A report's content, before it is HTML or text: frozen blocks in sections, every number with its source."""

import math
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Number:
    """A number as it is shown, and exactly."""

    value: float
    text: str
    """Rounded, with its unit."""
    source: str
    """Where it comes from: `summary.json:seconds`, or `metrics.jsonl:3:loss` of the third object."""


@dataclass(frozen=True)
class Link:
    """Text that leads to a file beside the page."""

    text: str
    target: str
    """Relative, and quoted as a URL."""


Cell: TypeAlias = str | Number | Link | None


@dataclass(frozen=True)
class Table:
    """Rows under a head."""

    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    folded: str = ""
    """Shown only when asked for, under this name; text leaves it out."""


@dataclass(frozen=True)
class Curve:
    """A line of a chart."""

    label: str
    points: tuple[tuple[float, float], ...]
    faint: bool = False
    """Drawn thinly, behind its smoothed form."""
    dotted: bool = False
    """Few measurements: each is drawn."""


@dataclass(frozen=True)
class Chart:
    """Curves over a common axis."""

    title: str
    x_label: str
    curves: tuple[Curve, ...]
    log: bool = False
    """Its vertical axis is logarithmic where a reader asks for that."""
    marks: tuple[float, ...] = ()
    """Where a vertical line is drawn."""


@dataclass(frozen=True)
class Bars:
    """One bar per row, of one or several parts."""

    title: str
    rows: tuple[tuple[str, tuple[tuple[str, Number], ...]], ...]
    """Each bar's label and its parts: what they are, and how much."""


@dataclass(frozen=True)
class HeatMap:
    """Numbers over a common axis, one line of cells per row, darker where they are larger; logarithmic."""

    title: str
    x_label: str
    columns: tuple[float, ...]
    rows: tuple[tuple[str, tuple[float | None, ...]], ...]
    """Each line's label and its numbers, as many as there are columns; what is not above zero is an empty cell."""


@dataclass(frozen=True)
class Marked:
    """Text with marked parts."""

    label: str
    pieces: tuple[tuple[str, str], ...]
    """Text and its mark: `""`, `loss`, `removed` or `added`."""


@dataclass(frozen=True)
class Code:
    """A file, folded."""

    title: str
    text: str


@dataclass(frozen=True)
class Note:
    """A sentence."""

    text: str


Block: TypeAlias = Table | Chart | Bars | HeatMap | Marked | Code | Note


@dataclass(frozen=True)
class Section:
    """Blocks under a heading."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Document:
    """A page."""

    title: str
    subtitle: str
    sections: tuple[Section, ...]


def number(value: Any, form: str, source: str, unit: str = "") -> Number | None:
    """Return a value as a cell; None where it is missing.

    Args:
        value: from a run folder.
        form: a format specification, or `duration` for seconds.
        source: as `Number.source`.
        unit: written behind it.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not math.isfinite(value):
        return Number(value, str(value), source)
    text = duration(value) if form == "duration" else f"{value:{form}}"
    return Number(value, text + unit, source)


def duration(seconds: float) -> str:
    """Return seconds as `1:05` or `2:03:20`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
