"""Prints a report as text, for terminals without a browser."""

import math
import sys
from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from ..recipe.errors import printable
from .page import Bars, Block, Chart, Document, HeatMap, Link, Marked, Note, Number, Table, rounded

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 48
"""Width of a curve and of a bar, in characters."""
STYLES = {"loss": "green", "removed": "red strike", "added": "green", "": ""}


def show(document: Document) -> None:
    """Print a report without the folded tables and the files, which only the page contains."""
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=True)
    console.print(_plain(document.title), style="bold")
    console.print(_plain(document.subtitle))
    for section in document.sections:
        lines = [
            _plain(line) if isinstance(line, str) else line
            for block in section.blocks
            for line in _lines(block, console.is_terminal and not console.no_color)
        ]
        if lines:
            console.print()
            console.print(_plain(section.title.upper()), style="bold")
        for line in lines:
            console.print(line)


def _lines(block: Block, coloured: bool) -> Iterator[RenderableType]:
    """Yield a block's lines; none for blocks that only the page contains."""
    match block:
        case Note(text):
            yield text
        case Table(head, rows, folded=""):
            table = RichTable(box=SIMPLE_HEAD, show_header=any(head), pad_edge=False, show_edge=False)
            for name in head:
                table.add_column(_plain(name), overflow="fold")
            for row in rows:
                shown = (cell.text if isinstance(cell, Number | Link) else cell for cell in row)
                table.add_row(*(_plain("-" if one is None else one) for one in shown))
            yield table
        case Marked(label, pieces):
            marked = Text(f"  {printable(label)}: ")
            for text, mark in pieces:
                if mark == "removed" and not coloured:
                    continue  # without colour an answer is shown as it is, not its differences
                around = "«»" if mark == "loss" and not coloured else ""
                marked.append(f"{around[:1]}{printable(text)}{around[-1:]}", STYLES[mark] if coloured else "")
            yield marked
        case Bars(title, bars):
            yield title
            wide = max((len(label) for label, _ in bars), default=0)
            for label, parts in bars:
                bar = "#" * round(WIDTH * sum(size.value for _, size in parts) / block.longest)
                sizes = (f"{name} {size.text}" if len(parts) > 1 else size.text for name, size in parts)
                yield f"  {label:<{wide}}  {bar:<{WIDTH}}  {', '.join(sizes)}"
        case HeatMap(title, _, _, lines):
            yield f"{title}, each line on its own scale"
            wide = max(len(label) for label, _ in lines)
            for label, values in lines:
                if kept := [value for value in values if value and value > 0]:
                    course = sparkline([math.log(value) for value in kept])
                    yield f"  {label:<{wide}}  {course:<{WIDTH}}  {kept[0]:.3g} -> {kept[-1]:.3g}"
        case Chart(title, x_label, curves):
            yield title
            for curve in curves:
                if curve.points:
                    (first, start), (last, end) = curve.points[0], curve.points[-1]
                    course = sparkline([value for _, value in curve.points])
                    ends = f"{rounded(start)} at {x_label} {rounded(first)}, {rounded(end)} at {rounded(last)}"
                    yield f"  {course}  {curve.label}: {ends}"


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
