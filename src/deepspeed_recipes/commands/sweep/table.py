"""Shows a sweep's results as a table in the terminal and as a plot."""

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from ...recipe.methods import metrics
from .trials import Result, ranked


def table(results: Sequence[Result], keys: Sequence[str]) -> Table:
    """Return the table of a sweep, best first; a failed trial is a row with its reason."""
    shown = Table("trial", *keys, highlight=False)
    found = ranked(results)
    metric = found[0].metric
    for name in (metrics.title(metric), *HEADS):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("")
    for at, one in enumerate(found):
        values = dict(word.split("=", 1) for word in one.overrides)
        row = [str(one.trial), *(values[key] for key in keys)]
        if one.status:
            shown.add_row(*row, "-", *("-" for _ in HEADS), f"status {one.status}: {one.reason}")
        else:
            shown.add_row(*row, score(one), *numbers(one), "best" if at == 0 else "")
    return shown


HEADS = ("held-out loss", "training loss", "tokens/s", "seconds")


def score(one: Result) -> str:
    """Return a result's score, formatted."""
    return "-" if one.score is None else metrics.shown(one.metric, one.score)


def numbers(one: Result) -> list[str]:
    """Return the other numbers of a row, in the order of `HEADS`."""
    given = ((one.held_out_loss, ".4f"), (one.loss, ".4f"), (one.tokens_per_second, ",.0f"), (one.seconds, ".0f"))
    return ["-" if value is None else f"{value:{form}}" for value, form in given]


def draw(results: Sequence[Result], keys: Sequence[str], file: Path) -> bool:
    """Draw the score over each varied key; return False if no trial has a score."""
    done = [one for one in results if one.score is not None]
    if not done:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot  # most of a second, needed once

    figure, axes = pyplot.subplots(
        1, len(keys), figsize=(4.5 * len(keys), 4), layout="constrained", sharey=True, squeeze=False
    )
    best = ranked(done)[0]
    for axis, key in zip(axes.flat, keys, strict=True):
        values = [dict(word.split("=", 1) for word in one.overrides)[key] for one in done]
        places: list[float] | list[str] = values
        try:
            places = [float(value) for value in values]
            if min(places) > 0 and max(places) >= 5 * min(places):
                axis.set_xscale("log")
        except ValueError:
            pass  # words: matplotlib treats them as categories
        axis.plot(places, [one.score for one in done], "o", alpha=0.6)
        axis.plot(places[done.index(best)], best.score, "*", markersize=14, label=f"best: trial {best.trial}")
        axis.set_xlabel(key)
        axis.grid(alpha=0.3)
    direction = "higher" if metrics.higher_is_better(best.metric) else "lower"
    axes[0, 0].set_ylabel(f"{metrics.title(best.metric)} ({direction} is better)")
    axes[0, 0].legend()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    return True
