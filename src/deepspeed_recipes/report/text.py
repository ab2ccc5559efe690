"""Prints a report as text, for terminals without a browser."""

import math
import sys
from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from ..recipe.errors import printable
from .document import Bars, Block, Cell, Chart, Curve, Document, HeatMap, Link, Marked, Note, Number, Table

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 48
"""Width of a curve and of a bar, in characters."""
STYLES = {"loss": "green", "removed": "red strike", "added": "green", "": ""}
BRACKETS = {"loss": "«»", "removed": "-", "added": "+"}
"""Brackets around marked text on terminals without colour."""


def show(document: Document) -> None:
    """Print a report without the folded tables and the files, which only the page contains."""
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=True)
    console.print(_plain(document.title), style="bold")
    console.print(_plain(document.subtitle))
    for section in document.sections:
        shown = [one for block in section.blocks for one in lines(block, _coloured(console))]
        if shown:
            console.print()
            console.print(_plain(section.title.upper()), style="bold")
        for one in shown:
            console.print(one)


def _coloured(console: Console) -> bool:
    return console.is_terminal and not console.no_color


def lines(block: Block, coloured: bool) -> Sequence[RenderableType]:
    """Return a block as rich renderables; none for blocks that only the page contains."""
    if isinstance(block, Note):
        return [_plain(block.text)]
    if isinstance(block, Table):
        return [] if block.folded else [_table(block)]
    if isinstance(block, Marked):
        return [_marked(block, coloured)]
    if isinstance(block, Bars):
        return [_plain(block.title), *map(_plain, _bars(block))]
    if isinstance(block, HeatMap):
        return [_plain(f"{block.title}, each line on its own scale"), *map(_plain, _heat(block))]
    if isinstance(block, Chart):
        return [_plain(block.title), *(_plain(_curve(curve, block.x_label)) for curve in block.curves if curve.points)]
    return []


def _table(block: Table) -> RichTable:
    table = RichTable(box=SIMPLE_HEAD, show_header=any(block.head), pad_edge=False, show_edge=False)
    for name in block.head:
        table.add_column(_plain(name), overflow="fold")
    for row in block.rows:
        table.add_row(*(_plain(_cell(value)) for value in row))
    return table


def _cell(value: Cell) -> str:
    if isinstance(value, Number | Link):
        return value.text
    return "-" if value is None else value


def _marked(block: Marked, coloured: bool) -> Text:
    found = Text(f"  {printable(block.label)}: ")
    for text, mark in block.pieces:
        around = "" if coloured else BRACKETS.get(mark, "")
        found.append(f"{around[:1]}{printable(text)}{around[-1:]}", STYLES[mark] if coloured else "")
    return found


def _bars(block: Bars) -> Sequence[str]:
    longest = max((sum(size.value for _, size in parts) for _, parts in block.rows), default=0) or 1
    wide = max((len(label) for label, _ in block.rows), default=0)
    return [
        f"  {label:<{wide}}  {'#' * round(WIDTH * sum(size.value for _, size in parts) / longest):<{WIDTH}}  "
        + ", ".join(f"{name} {size.text}" if len(parts) > 1 else size.text for name, size in parts)
        for label, parts in block.rows
    ]


def _heat(block: HeatMap) -> Iterator[str]:
    """Yield each line as a logarithmic sparkline with its first and last number."""
    wide = max(len(label) for label, _ in block.rows)
    for label, values in block.rows:
        kept = [value for value in values if value and value > 0]
        if kept:
            course = sparkline([math.log(value) for value in kept])
            yield f"  {label:<{wide}}  {course:<{WIDTH}}  {kept[0]:.3g} -> {kept[-1]:.3g}"


def _curve(curve: Curve, x_label: str) -> str:
    values = [value for _, value in curve.points]
    (first, _), (last, _) = curve.points[0], curve.points[-1]
    return (
        f"  {sparkline(values)}  {curve.label}: {values[0]:.4g} at {x_label} {first:,g}, {values[-1]:.4g} at {last:,g}"
    )


def sparkline(values: Sequence[float]) -> str:
    """Return the curve as a line of block characters, each as high as the mean of its values."""
    count = min(WIDTH, len(values))
    parts = [values[len(values) * at // count : len(values) * (at + 1) // count] for at in range(count)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    steps = (len(BLOCKS) - 1) / (high - low) if high > low else 0
    return "".join(BLOCKS[round((mean - low) * steps)] for mean in means)


def _plain(text: str) -> Text:
    return Text(printable(text))
