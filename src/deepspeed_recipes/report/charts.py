"""Draws charts as SVG with matplotlib, in the colours of the page that contains them."""

import io
import re
from collections.abc import Sequence
from operator import itemgetter
from xml.etree import ElementTree

from ..recipe.errors import printable
from ..recipe.files import Json
from .page import LEAST_POINTS, Chart, Curve

SVG = "http://www.w3.org/2000/svg"
LINK = "{http://www.w3.org/1999/xlink}href"
INK, GRID, MARK = "#0a0b01", "#0a0b02", "#0a0b03"
"""Placeholders that are replaced by the page's colours, which follow the reader's light or dark mode."""
SERIES = tuple(f"#0a0c0{index}" for index in range(6))
"""Placeholders for the colours of curves."""
PAGE_COLOURS = {INK: "currentColor", GRID: "var(--grid)", MARK: "var(--mark)"} | {
    colour: f"var(--curve-{index})" for index, colour in enumerate(SERIES)
}
MOST_DRAWN = 2000
"""Maximum number of points per curve; more than a chart has pixels horizontally."""
NARROW = 0.005
"""Share of the values by which a curve has to change for its axis to begin above 0."""
MOST_POINTS = 150
"""Maximum number of points per curve with a tooltip."""


def svg(chart: Chart, name: str, log: bool = False) -> str:
    """Return a chart as an SVG element, in which `name` is the prefix of ids, unique among the charts of a page.

    A logarithmic vertical axis (`log`) omits values that are not positive.
    """
    import matplotlib
    from matplotlib.figure import Figure  # imported here because it takes half a second

    options = {"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif", "font.size": 11}
    with matplotlib.rc_context(options):
        figure = Figure(figsize=(7, 3), layout="constrained")
        axes = figure.add_subplot()
        values = [value for curve in chart.curves for _, value in curve.points]
        for index, curve in enumerate(chart.curves):
            kept = visible(curve, log)
            if not kept:
                continue
            colour, few = SERIES[index % len(SERIES)], len(kept) < LEAST_POINTS
            line: Json = {"linewidth": 1.8, "alpha": 0.35 if curve.faint else 1}
            line |= {"marker": "o" if curve.dotted or few else None, "markersize": 4}
            line |= {"linestyle": "none" if few else "-"}
            axes.plot([at for at, _ in kept], [value for _, value in kept], color=colour, **line)
            some = spoken(curve, log)  # invisible dots on the curve, for the tooltips
            dots: Json = {"linestyle": "none", "marker": "o", "markersize": 9, "alpha": 0, "markeredgewidth": 0}
            axes.plot([at for at, _ in some], [value for _, value in some], color=colour, gid=f"dots-{index}", **dots)
        for at in chart.marks:
            axes.axvline(at, color=MARK, linestyle="--", linewidth=1)
        low, high = min(values, default=0), max(values, default=0)
        if not log and 0 < high - low < NARROW * low:
            axes.set_ylim(0, 1.2 * high)  # otherwise noise would look like a curve
        axes.ticklabel_format(useOffset=False)
        if log:
            axes.set_yscale("log", nonpositive="mask")
        axes.set_xlabel(chart.x_label)
        axes.margins(x=0.02)
        axes.grid(color=GRID, linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(GRID)
        axes.tick_params(which="both", colors=INK)
        axes.xaxis.label.set_color(INK)
        axes.patch.set_visible(False)
        figure.patch.set_visible(False)
        file = io.StringIO()
        # Without date and creator, so that the same run always has the same report.
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return _for_page(file.getvalue(), chart, name, log)


def visible(curve: Curve, log: bool) -> Sequence[tuple[float, float]]:
    """Return the points of a curve that its axis can show; a long curve is reduced to minima and maxima."""
    kept = [(at, value) for at, value in curve.points if value > 0 or not log]
    every = -(-len(kept) // MOST_DRAWN)
    if every <= 1:
        return kept
    parts = (kept[start : start + 2 * every] for start in range(0, len(kept), 2 * every))
    height = itemgetter(1)
    return [point for part in parts for point in sorted({min(part, key=height), max(part, key=height)})]


def spoken(curve: Curve, log: bool) -> Sequence[tuple[float, float]]:
    """Return the points with a tooltip: all, or every n-th; none for a curve that is also drawn smoothed."""
    kept = [] if curve.faint else visible(curve, log)
    return kept[:: -(-len(kept) // MOST_POINTS) or 1]


def _for_page(text: str, chart: Chart, name: str, log: bool) -> str:
    """Return matplotlib's SVG as an element of a page, with unique ids, tooltips, and the page's style."""
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", LINK[1:].partition("}")[0])
    root = ElementTree.fromstring(text)
    for needless in (*root.findall(f"{{{SVG}}}metadata"), *root.findall(f"{{{SVG}}}defs[{{{SVG}}}style]")):
        root.remove(needless)  # the page has a style sheet
    for size in ("width", "height"):
        root.attrib.pop(size, None)  # as wide as the page; viewBox keeps the proportions
    root.attrib |= {"role": "img", "aria-label": printable(chart.title)}
    for index, curve in enumerate(chart.curves):
        group = root.find(f".//*[@id='dots-{index}']")
        dots = group.findall(f".//{{{SVG}}}use") if group is not None else []
        for dot, (at, value) in zip(dots, spoken(curve, log), strict=bool(dots)):
            ElementTree.SubElement(dot, f"{{{SVG}}}title").text = f"{printable(curve.label)}, {at:,g}: {value:.6g}"
    for element in root.iter():
        if "id" in element.attrib:
            element.set("id", f"{name}-{element.get('id')}")
        if LINK in element.attrib:
            element.set("href", f"#{name}-{element.attrib.pop(LINK).removeprefix('#')}")
        for key, given in element.attrib.items():
            own = re.sub(r"font-family:[^;]*; ", "", given.replace("url(#", f"url(#{name}-"))  # the page has a font
            element.set(key, re.sub("#0a0[bc]0[0-9]", lambda found: PAGE_COLOURS[found[0]], own))
    return ElementTree.tostring(root, encoding="unicode")
