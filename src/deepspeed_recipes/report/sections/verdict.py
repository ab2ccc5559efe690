"""The section with a run's results: the score before and after, time, speed and memory, next to the predictions."""

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from ...recipe.methods import metrics
from ..document import Cell, Note, Number, Section, Table, number
from ..run_data import RunData

UNITS = {"loss": " nats"}
"""Units of metrics, by name."""


def section(run: RunData) -> Section:
    """Return the first section: one sentence, then the numbers."""
    found = tuple(rows(run))
    shown = 3 if any(predicted is not None for _, _, predicted in found) else 2  # there are no predictions for CPUs
    table = Table(("", "measured", "predicted")[:shown], tuple(row[:shown] for row in found))
    warning = run.summary.get("warning")
    return Section("Verdict", (Note(sentence(run)), *((Note(str(warning)),) if warning else ()), table))


def sentence(run: RunData) -> str:
    """Return the run's result as one sentence."""
    name, before, after = score(run)
    last = run.metrics[-1]
    spent = number(last.get("seconds"), "duration", "")
    how = f"{last['step']} step{'' if last['step'] == 1 else 's'}" + (f", {spent.text} of training" if spent else "")
    if run.summary.get("stopped"):
        return f"Stopped after {how}; the same command with --resume continues it."
    if not run.summary:
        return f"Not finished: {how} logged, but summary.json is missing. The run is still training, or it failed."
    if before is None or after is None:
        first = number(run.metrics[0].get("loss"), ".4f", "")
        end = number(last.get("loss"), ".4f", "")
        if len(run.metrics) == 1:
            return f"Training loss {end.text if end else '-'} before the only update, in {how}."
        return f"Training loss {first.text if first else '-'} -> {end.text if end else '-'} in {how}."
    return f"{name} on held-out examples: {before.text} -> {after.text}, in {how}."


def score(run: RunData) -> tuple[str, Number | None, Number | None]:
    """Return the name of the run's main metric, and its values before and after training."""
    metric = str(run.summary.get("metric") or run.recipe.data.metric)
    form, unit = metrics.form(metric), UNITS.get(metric, "")
    before, after = (number(run.summary.get(key), form, f"summary.json:{key}", unit) for key in ("before", "after"))
    return metrics.title(metric).capitalize(), before, after


def rows(run: RunData) -> Iterator[tuple[Cell, ...]]:
    """Yield the rows of the table that have a value."""
    for label, measured, predicted in _all_rows(run):
        if measured is not None or predicted is not None:
            yield label, measured, predicted


def _all_rows(run: RunData) -> Iterator[tuple[str, Cell, Cell]]:
    name, before, after = score(run)
    yield f"{name}, before", before, None
    yield f"{name}, after", after, None
    if run.summary.get("metric") != "loss":
        measured = [(index, row) for index, row in enumerate(run.evaluations, 1) if "loss" in row]
        for when, (index, row) in zip(("before", "after"), measured[:1] + measured[1:][-1:], strict=False):
            yield f"Held-out loss, {when}", number(row["loss"], ".4f", f"evaluations.jsonl:{index}:loss", " nats"), None
    yield "Training loss, last step", _of_last(run, "loss", ".4f", " nats"), None
    yield "Steps", _of_last(run, "step", ",d"), None
    yield "Tokens", _of_last(run, "tokens", ",d"), None
    yield "Training time", _of_last(run, "seconds", "duration"), None
    predicted = run.summary.get("predicted") or {}
    speed = number(run.summary.get("tokens_per_second"), ",.0f", "summary.json:tokens_per_second")
    yield "Tokens per second, all ranks", speed, _predicted(predicted, "tokens_per_second", ",.0f")
    yield "Model FLOPs utilisation, median", mfu(run), None
    memory = (("allocated", "gpu_peak_gib", "gpu_allocated_gib"), ("reserved", "gpu_reserved_gib", "gpu_reserved_gib"))
    for what, key, planned in memory:
        peak = number(run.summary.get(key), ".2f", f"summary.json:{key}", " GiB")
        yield f"Peak GPU memory, {what}, rank 0", peak, _predicted(predicted, planned, ".2f", " GiB")
    host = number(run.summary.get("host_peak_gib"), ".2f", "summary.json:host_peak_gib", " GiB")
    yield "Peak host memory, rank 0", host, None
    difference = number(run.summary.get("logit_difference"), ".1e", "summary.json:logit_difference")
    yield "Largest logit difference of the reloaded export", difference, None
    if parts := run.summary.get("not_loaded"):
        yield "In the model's files, but not in the export", ", ".join(map(str, parts)), None
    yield "Restarts", number(len(run.restarts) or None, "d", "restarts.jsonl:count"), None


def _of_last(run: RunData, key: str, form: str, unit: str = "") -> Number | None:
    return number(run.metrics[-1].get(key), form, f"metrics.jsonl:{len(run.metrics)}:{key}", unit)


def _predicted(predicted: Mapping[str, Any], key: str, form: str, unit: str = "") -> Number | None:
    return number(predicted.get(key), form, f"summary.json:predicted.{key}", unit)


def mfu(run: RunData) -> Number | None:
    """Return the median of the logged model FLOPs utilisation, or None if the hardware's peak is unknown."""
    shares = [row["mfu"] for row in run.metrics if isinstance(row.get("mfu"), float)]
    return number(median(shares), ".1%", "metrics.jsonl:median:mfu") if shares else None
