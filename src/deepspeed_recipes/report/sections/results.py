"""The sections with a run's results beside the predictions, and with the newest result of `ds-recipes evaluate`."""

from collections.abc import Iterator
from statistics import median
from typing import Any

from ...recipe.methods import metrics
from ..page import Cell, Note, Number, Section, Table, number
from ..run_data import RunData

UNITS = {"loss": " nats"}
"""Units of metrics, by name."""


def verdict(run: RunData) -> Section:
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
    spent = run.last("seconds", "duration")
    how = f"{last['step']} step{'' if last['step'] == 1 else 's'}" + (f", {spent.text} of training" if spent else "")
    if run.summary.get("stopped"):
        return f"Stopped after {how}; the same command with --resume continues it."
    if not run.summary:
        return f"Not finished: {how} logged, but summary.json is missing. The run is still training, or it failed."
    if before is None or after is None:
        first, end = (cell.text if cell else "-" for cell in (_loss(run, 1), _loss(run, len(run.metrics))))
        if len(run.metrics) == 1:
            return f"Training loss {end} before the only update, in {how}."
        return f"Training loss {first} -> {end} in {how}."
    return f"{name} on held-out examples: {before.text} -> {after.text}, in {how}."


def _loss(run: RunData, row: int) -> Number | None:
    return number(run.metrics[row - 1].get("loss"), ".4f", f"metrics.jsonl:{row}:loss")


def score(run: RunData) -> tuple[str, Number | None, Number | None]:
    """Return the name of the run's main metric, and its values before and after training."""
    metric = str(run.summary.get("metric") or run.recipe.data.metric)
    form, unit = metrics.form(metric), UNITS.get(metric, "")
    before, after = (run.number(f"summary.json:{key}", form, unit) for key in ("before", "after"))
    return metrics.title(metric).capitalize(), before, after


def rows(run: RunData) -> Iterator[tuple[Cell, ...]]:
    """Yield label, measured and predicted value of the rows that have a value."""
    name, before, after = score(run)
    found: list[tuple[str, Cell, Cell]] = [(f"{name}, before", before, None), (f"{name}, after", after, None)]
    if run.summary.get("metric") != "loss":
        measured = [(index, row) for index, row in enumerate(run.evaluations, 1) if "loss" in row]
        for when, (index, row) in zip(("before", "after"), measured[:1] + measured[1:][-1:], strict=False):
            loss = number(row["loss"], ".4f", f"evaluations.jsonl:{index}:loss", " nats")
            found.append((f"Held-out loss, {when}", loss, None))
    shares = [row["mfu"] for row in run.metrics if isinstance(row.get("mfu"), float)]

    def of_summary(key: str, form: str, unit: str = "") -> Number | None:
        return run.number(f"summary.json:{key}", form, unit)

    found += [
        ("Training loss, last step", run.last("loss", ".4f", " nats"), None),
        ("Steps", run.last("step", ",d"), None),
        ("Tokens", run.last("tokens", ",d"), None),
        ("Training time", run.last("seconds", "duration"), None),
        (
            "Tokens per second, all ranks",
            of_summary("tokens_per_second", ",.0f"),
            of_summary("predicted.tokens_per_second", ",.0f"),
        ),
        (
            "Model FLOPs utilisation, median",
            number(median(shares), ".1%", "metrics.jsonl:median:mfu") if shares else None,
            None,
        ),
        (
            "Peak GPU memory, allocated, rank 0",
            of_summary("gpu_peak_gib", ".2f", " GiB"),
            of_summary("predicted.gpu_allocated_gib", ".2f", " GiB"),
        ),
        (
            "Peak GPU memory, reserved, rank 0",
            of_summary("gpu_reserved_gib", ".2f", " GiB"),
            of_summary("predicted.gpu_reserved_gib", ".2f", " GiB"),
        ),
        ("Peak host memory, rank 0", of_summary("host_peak_gib", ".2f", " GiB"), None),
        ("Largest logit difference of the reloaded export", of_summary("logit_difference", ".1e"), None),
        (
            "In the model's files, but not in the export",
            ", ".join(map(str, run.summary.get("not_loaded") or ())) or None,
            None,
        ),
        ("Restarts", number(len(run.restarts) or None, "d", "restarts.jsonl:count"), None),
    ]
    yield from (row for row in found if row[1] is not None or row[2] is not None)


def evaluation(run: RunData) -> Iterator[Section]:
    """Yield the section that compares the run with other models, if it was evaluated."""
    blocks: list[Any] = []
    places = ["", *(f"tasks.{at}." for at in range(len(run.evaluation.get("tasks") or ())))]
    for place, found in zip(places, [run.evaluation, *(run.evaluation.get("tasks") or ())], strict=True):
        models, pairs = (
            [(f"evaluation.json:{place}{key}.{at}.", one) for at, one in enumerate(found.get(key) or ())]
            for key in ("models", "pairs")
        )
        if not models:
            continue
        metric = str(found.get("metric"))
        form, unit, title = metrics.form(metric), UNITS.get(metric, ""), metrics.title(metric).capitalize()
        blocks.append(Note(f"{title} on {found.get('examples')} examples of {found.get('data')}:"))
        scores = tuple(
            (str(one.get("name")), *(run.number(source + key, form, unit) for key in ("score", "low", "high")))
            for source, one in models
        )
        blocks.append(Table(("model", "score", "from", "to (95 % interval)"), scores))
        if pairs:
            forms = {"better": ",d", "worse": ",d", "p": ".2g"}
            tests = tuple(
                (
                    str(one.get("second")),
                    str(one.get("first")),
                    *(run.number(source + key, form) for key, form in forms.items()),
                )
                for source, one in pairs
            )
            blocks.append(Table(("model", "compared with", "better on", "worse on", "p (exact paired test)"), tests))
    if blocks:
        yield Section("Evaluation", tuple(blocks))
