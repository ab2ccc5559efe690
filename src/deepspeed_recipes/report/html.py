"""Renders a report as one HTML file, without network access or scripts, for light and dark mode and any screen."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..recipe import files
from ..recipe.errors import printable
from .document import Block, Cell, Chart, Document, HeatMap

FOLDER = Path(__file__).parent
TEMPLATE = "page.html.jinja"


def render(document: Document) -> str:
    """Return the page.

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
    environment.globals |= {"kind": kind, "svgs": svgs, "share": share, "shades": shades}
    template = environment.get_template(TEMPLATE)
    return template.render(document=document, style=(FOLDER / "style.css").read_text(encoding="utf-8")).lstrip()


def write(path: Path, document: Document) -> None:
    """Write the page atomically, so that it is never incomplete, even if several runs end together.

    Raises:
        OSError: the file cannot be written.
    """
    files.write_text(path, render(document))


def kind(block: Block | Cell) -> str:
    """Return the kind of a block or cell, which is the name of the template's macro for a block."""
    return type(block).__name__.lower()


def svgs(chart: Chart, name: str) -> Iterator[tuple[str, Any]]:
    """Yield (name of the axis, SVG) for a chart: linear, and logarithmic if the chart offers it."""
    from markupsafe import Markup

    from . import charts

    for axis in ("linear", "log") if chart.log else ("linear",):
        yield axis, Markup(charts.svg(chart, f"{name}-{axis}", axis == "log"))


def share(value: float, bars: Any) -> str:
    """Return the size of a bar's part in percent of the longest bar."""
    longest = max((sum(part.value for _, part in parts) for _, parts in bars.rows), default=0)
    return f"{100 * value / longest:.2f}" if longest else "0"


LIGHTEST = 0.08
"""Opacity of the smallest number of a heat map; the largest has 1."""


def shades(block: HeatMap) -> Iterator[tuple[str, tuple[tuple[int, str, str], ...]]]:
    """Yield each line's label and its cells: (number of the column, opacity, tooltip)."""
    known = [math.log(value) for _, values in block.rows for value in values if value and value > 0]
    low, high = min(known, default=0.0), max(known, default=0.0)
    for label, values in block.rows:
        cells = []
        for at, (column, value) in enumerate(zip(block.columns, values, strict=True)):
            if value and value > 0:
                shade = (math.log(value) - low) / (high - low) if high > low else 1.0
                shown = f"{label}, {block.x_label} {column:,g}: {value:.3g}"
                cells.append((at, f"{LIGHTEST + (1 - LIGHTEST) * shade:.2f}", shown))
        yield label, tuple(cells)
