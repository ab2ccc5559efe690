"""A report: sections of blocks, in which every number has its source; `page.html.jinja` and `text.py` show them."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

LEAST_POINTS = 3
"""The number of points from which on they are drawn as a curve."""
LIGHTEST = 0.08
"""Opacity of the smallest number of a heat map; the largest has 1."""


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
    """Text that links to a file near the page, whose relative path is quoted as a URL."""

    text: str
    target: str


Cell: TypeAlias = str | Number | Link | None
Parts: TypeAlias = tuple[tuple[str, Number], ...]


@dataclass(frozen=True)
class Table:
    """Rows under a head. A `folded` title folds the table in HTML and omits it from text."""

    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    folded: str = ""


@dataclass(frozen=True)
class Curve:
    """A line of a chart: faint behind its smoothed form, dotted with a marker at each of its few measurements."""

    label: str
    points: tuple[tuple[float, float], ...]
    faint: bool = False
    dotted: bool = False


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

    def block(self) -> "Chart | Note":
        """Return the chart, or a sentence if no curve has `LEAST_POINTS` or none changes."""
        title = self.title[:1].upper() + self.title[1:]
        values = {value for curve in self.curves for _, value in curve.points}
        longest = max(self.curves, key=lambda curve: len(curve.points))
        if len(longest.points) >= LEAST_POINTS and len(values) > 1:
            return self
        if len(longest.points) >= LEAST_POINTS:
            return Note(f"{title}: {rounded(values.pop())} at all {len(longest.points)} measurements.")
        said = (
            f"{curve.label + ' ' if len(self.curves) > 1 else ''}"
            + ", ".join(f"{rounded(value)} at {self.x_label} {rounded(at)}" for at, value in curve.points)
            for curve in self.curves
            if curve.points
        )
        return Note(f"{title}: {'; '.join(said)}.")


@dataclass(frozen=True)
class Bars:
    """One bar per row, with its label and one or several named parts."""

    title: str
    rows: tuple[tuple[str, Parts], ...]

    @property
    def longest(self) -> float:
        """The size of the longest bar, or 1 if all are empty."""
        return max((sum(part.value for _, part in parts) for _, parts in self.rows), default=0) or 1


@dataclass(frozen=True)
class HeatMap:
    """Numbers over a common axis: one line of cells per row, darker for larger numbers, on a logarithmic scale."""

    title: str
    x_label: str
    columns: tuple[float, ...]
    rows: tuple[tuple[str, tuple[float | None, ...]], ...]
    """Each line's label and its numbers, one per column; a number that is not positive is an empty cell."""
    note: str = ""
    """Added to the scale."""

    @property
    def extent(self) -> tuple[float, float]:
        """The lowest and the highest number, which have the lightest and the darkest colour."""
        known = [value for _, values in self.rows for value in values if value and value > 0]
        return min(known, default=0.0), max(known, default=0.0)

    def shades(self) -> Iterator[tuple[str, list[tuple[int, str, str]]]]:
        """Yield each line's label and its cells: (number of the column, opacity, tooltip)."""
        low, high = (math.log(one or 1) for one in self.extent)
        for label, values in self.rows:
            cells = []
            for at, (column, value) in enumerate(zip(self.columns, values, strict=True)):
                if value and value > 0:
                    shade = (math.log(value) - low) / (high - low) if high > low else 1.0
                    shown = f"{label}, {self.x_label} {column:,g}: {value:.3g}"
                    cells.append((at, f"{LIGHTEST + (1 - LIGHTEST) * shade:.2f}", shown))
            yield label, cells


@dataclass(frozen=True)
class Marked:
    """Text in pieces, each with its mark: `""`, `loss`, `removed` or `added`.

    The `special` tokens among it are shown as such.
    """

    label: str
    pieces: tuple[tuple[str, str], ...]
    special: tuple[str, ...] = ()

    def parts(self) -> Iterator[tuple[list[tuple[str, bool]], str]]:
        """Yield each piece, divided into text and special tokens, and its mark."""
        tokens = "|".join(map(re.escape, sorted(self.special, key=len, reverse=True)))
        for text, mark in self.pieces:
            found = re.split(f"({tokens})", text) if tokens else [text]
            yield [(part, bool(at % 2)) for at, part in enumerate(found) if part], mark


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


def rounded(value: float) -> str:
    """Return a number with four digits, and a large one as a whole number instead of with an exponent."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def number(value: object, form: str, source: str, unit: str = "") -> Number | None:
    """Return a value of a run folder as a cell, or None if it is missing.

    `form` is a format specification, or `duration` for seconds; `source` is as in `Number.source`; `unit` follows.
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
