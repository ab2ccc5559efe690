"""A report's content, independent of HTML and text: frozen blocks in sections, every number with its source."""

import math
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Number:
    """A number, exact and as it is shown."""

    value: float
    text: str
    """Rounded, with its unit."""
    source: str
    """The number's origin: `summary.json:seconds`, or `metrics.jsonl:3:loss` for the third object of a log."""


@dataclass(frozen=True)
class Link:
    """Text that links to a file near the page."""

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
    """If set, the table is folded under this title in HTML, and omitted from text."""


@dataclass(frozen=True)
class Curve:
    """A line of a chart."""

    label: str
    points: tuple[tuple[float, float], ...]
    faint: bool = False
    """Drawn faintly, behind its smoothed form."""
    dotted: bool = False
    """Drawn with a marker at each of its few measurements."""


@dataclass(frozen=True)
class Chart:
    """Curves over a common axis."""

    title: str
    x_label: str
    curves: tuple[Curve, ...]
    log: bool = False
    """The reader can switch to a logarithmic vertical axis."""
    marks: tuple[float, ...] = ()
    """Positions of vertical lines."""


@dataclass(frozen=True)
class Bars:
    """One bar per row, with one or several parts."""

    title: str
    rows: tuple[tuple[str, tuple[tuple[str, Number], ...]], ...]
    """Each bar's label, and the names and sizes of its parts."""


@dataclass(frozen=True)
class HeatMap:
    """Numbers over a common axis: one line of cells per row, darker for larger numbers, on a logarithmic scale."""

    title: str
    x_label: str
    columns: tuple[float, ...]
    rows: tuple[tuple[str, tuple[float | None, ...]], ...]
    """Each line's label and its numbers, one per column; a number that is not positive is an empty cell."""


@dataclass(frozen=True)
class Marked:
    """Text with marked parts."""

    label: str
    pieces: tuple[tuple[str, str], ...]
    """Pieces of text, each with its mark: `""`, `loss`, `removed` or `added`."""


@dataclass(frozen=True)
class Code:
    """The text of a file, folded."""

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
    """Return a value as a cell, or None if it is missing.

    Args:
        value: a value from a run folder.
        form: a format specification, or `duration` for seconds.
        source: as in `Number.source`.
        unit: appended to the number.
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
