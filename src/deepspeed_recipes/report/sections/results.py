"""The sections with a run's results and predictions, and with the newest result of `ds-recipes evaluate`."""

import math
from collections.abc import Iterator
from pathlib import PurePath
from statistics import median

from ...recipe.errors import redact
from ...recipe.methods import method
from ...recipe.recipe import names
from ...recipe.run_folder import comparable
from ..page import Block, Cell, Note, Number, Section, Table, number
from ..run_data import Row, RunData
from . import curves
from .settings import moment

FEWEST = 20
"""Fewer updates than these show little."""
UNITS = {"loss": " nats"}
"""Units of metrics, by name."""


def verdict(run: RunData) -> Section:
    """Return the first section: one sentence, then the numbers."""
    found = tuple(rows(run))
    shown = 3 if any(predicted is not None for _, _, predicted in found) else 2
    table = Table(("", "measured", "predicted")[:shown], tuple(row[:shown] for row in found))
    said = Note(" ".join(filter(None, (sentence(run), judgement(run)))))
    chosen = []
    if ended := run.summary.get("stopped_early"):
        chosen.append(f"Stopped early {ended}.")
    if best := run.summary.get("exported_step"):
        chosen.append(f"Exported step {best}, the best evaluation by {score(run)[0].lower()}.")
    warned = Table(("Warnings of the run",), tuple((one,) for one in run.warnings))
    facts = Table(("", ""), tuple((name, value) for name, value in overview(run) if value))
    return Section("Verdict", (said, *map(Note, chosen), *((warned,) if run.warnings else ()), facts, table))


def overview(run: RunData) -> Iterator[tuple[str, Cell]]:
    """Yield what was trained, on what, how, where and when."""
    recipe, hardware = run.recipe, run.environment
    yield "Model", redact(recipe.model.path) + (", shrunken and randomly initialised" if recipe.draft.enabled else "")
    sources = (redact(PurePath(name).name if name.startswith("/") else name) for name in names(recipe.data.path))
    yield "Data", ", ".join(sources)
    lora = recipe.lora
    trained = f"LoRA of rank {lora.rank}" if lora else "all weights"
    title = recipe.method.title
    yield "Method", f"{title[:1].upper()}{title[1:]}, {trained}, {recipe.precision}, {PurePath(recipe.deepspeed).name}"
    if ranks := hardware.get("world_size"):
        gpus = hardware.get("gpus") or ()
        kinds = ", ".join(f"{gpus.count(kind)} x {kind}" for kind in dict.fromkeys(gpus))
        where = kinds or f"CPU, {hardware.get('cpu_count')} cores"
        more = " on the first node" if ranks > len(gpus) > 0 else ""
        yield "Hardware", f"{ranks} rank{'' if ranks == 1 else 's'}; {where}{more}"
    started = hardware.get("started") or (moment(run.system[0]["time"]) if run.system else None)
    if started:
        yield "Started", f"{str(started)[:16].replace('T', ' ')} UTC"


def judgement(run: RunData) -> str:
    """Return whether the run has improved the model, and whether it was long enough to tell, or nothing."""
    if not run.summary or run.summary.get("stopped"):
        return ""
    steps = run.metrics[-1]["step"]
    few = f"{steps} update{' is' if steps == 1 else 's are'} too few to judge." if steps < FEWEST else ""
    metric, (_, before, after) = run.summary.get("metric"), score(run)
    if before is None or after is None:
        what = "on held-out examples" if after is None else "so before training"
        return few or f"Nothing was measured {what}, so this does not show that the model is better."
    start, end, losses = before.value, after.value, curves.points(comparable(run.evaluations), "loss")
    if metric in method.SHARES:
        points, held_out = 100 * (end - start), (run.data.get("held_out") or {}).get("examples")
        said = f"It {'rose' if points > 0 else 'fell'} by {abs(points):.1f} points" if points else "It did not change"
        if not points and len(losses) > 1 and (moved := _moved(losses[0][1], losses[-1][1])):
            said += f", but the held-out loss {moved}"
        if not few and points and held_out and abs(end - start) < 1 / math.sqrt(held_out):
            few = f"on {held_out:,} examples such a difference can be chance."
    elif start > 0 and math.isfinite(end):
        said = f"It {_moved(start, end) or 'did not change'}"
    else:
        return few
    at, lowest = min(losses, key=lambda point: point[1], default=(0, math.inf))
    if not few and losses and losses[-1][1] > 1.02 * lowest:
        few = f"the held-out loss was lowest at step {at} and has risen since: train for less, or more slowly."
    return f"{said}; {few}" if few else f"{said}."


def _moved(start: float, end: float) -> str:
    """Return by how much a loss rose or fell, or nothing if by less than half a percent."""
    share = end / start - 1 if start > 0 and math.isfinite(end) else 0.0
    return f"{'rose' if share > 0 else 'fell'} by {abs(share):.0%}" if abs(share) >= 0.005 else ""


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
    if after is not None and before is None:
        return f"{name} on held-out examples: {after.text}, in {how}; before training it was not measured on them."
    if before is None or after is None:
        losses = (number(row.get("loss"), ".4f", "metrics.jsonl") for row in (run.metrics[0], last))
        first, end = (loss.text if loss else "-" for loss in losses)
        if len(run.metrics) == 1:
            return f"Training loss {end} before the only update, in {how}."
        return f"Training loss {first} -> {end} in {how}."
    return f"{name} on held-out examples: {before.text} -> {after.text}, in {how}."


def score(run: RunData) -> tuple[str, Number | None, Number | None]:
    """Return the name of the run's main metric, and its values before and after training."""
    metric = str(run.summary.get("metric") or run.recipe.metric)
    form, unit = method.form(metric), UNITS.get(metric, "")
    before, after = (run.number(f"summary.json:{key}", form, unit) for key in ("before", "after"))
    return curves.named(run.recipe, metric), before, after


def rows(run: RunData) -> Iterator[tuple[Cell, ...]]:
    """Yield label, measured and predicted value of the rows that have a value."""
    name, before, after = score(run)
    name = "Held-out loss" if run.summary.get("metric") == "loss" else name
    found: list[tuple[Cell, ...]] = [(f"{name}, before", before, None), (f"{name}, after", after, None)]
    kept = comparable(run.evaluations)
    measured = [(index, row) for index, row in enumerate(run.evaluations, 1) if row in kept]

    def ends(of: list[tuple[int, Row]]) -> Iterator[tuple[str, int, Row]]:
        yield from (("after" if row["step"] else "before", index, row) for index, row in of[:1] + of[1:][-1:])

    if run.summary.get("metric") != "loss":
        for when, index, row in ends([(index, row) for index, row in measured if "loss" in row]):
            loss = number(row["loss"], ".4f", f"evaluations.jsonl:{index}:loss", " nats")
            found.append((f"Held-out loss, {when}", loss, None))
    if kept:
        own = {part for part in run.recipe.data.metrics if part in kept[0]} - {"loss"}
        keys = [key for key in kept[0] if any(key == part or key.startswith(f"{part}_") for part in own)]
        for key in (key for key in keys if key != run.summary.get("metric")):
            for when, index, row in ends(measured):
                value = number(row.get(key), method.form(key), f"evaluations.jsonl:{index}:{key}")
                found.append((f"{method.title(key).capitalize()}, {when}", value, None))
    shares = [row["mfu"] for row in run.metrics if isinstance(row.get("mfu"), float)]

    mfu = number(median(shares), ".1%", "metrics.jsonl:median:mfu") if shares else None
    left_out = ", ".join(map(str, run.summary.get("not_loaded") or ())) or None

    def of_summary(form: str, unit: str, *keys: str) -> Iterator[Number | None]:
        return (run.number(f"summary.json:{key}", form, unit) for key in keys)

    in_gib = (".2f", " GiB")
    found += [
        ("Training loss, last step", run.last("loss", ".4f", " nats"), None),
        ("Steps", run.last("step", ",d"), None),
        ("Tokens", run.last("tokens", ",d"), None),
        ("Training time", run.last("seconds", "duration"), None),
        ("Tokens per second, all ranks", *of_summary(",.0f", "", "tokens_per_second", "predicted.tokens_per_second")),
        ("Model FLOPs utilisation, median", mfu, None),
        ("Peak GPU memory, allocated, rank 0", *of_summary(*in_gib, "gpu_peak_gib", "predicted.gpu_allocated_gib")),
        ("Peak GPU memory, reserved, rank 0", *of_summary(*in_gib, "gpu_reserved_gib", "predicted.gpu_reserved_gib")),
        ("Peak host memory, rank 0", *of_summary(*in_gib, "host_peak_gib"), None),
        ("Largest logit difference of the reloaded export", *of_summary(".1e", "", "logit_difference"), None),
        ("In the model's files, but neither loaded nor trained", left_out, None),
        ("Restarts", number(len(run.restarts) or None, "d", "restarts.jsonl:count"), None),
    ]
    yield from (row for row in found if row[1] is not None or row[2] is not None)


def evaluation(run: RunData) -> Iterator[Section]:
    """Yield the section that compares the run with other models, if it was evaluated."""
    blocks: list[Block] = []
    places = ["", *(f"tasks.{at}." for at in range(len(run.evaluation.get("tasks") or ())))]
    for place, found in zip(places, [run.evaluation, *(run.evaluation.get("tasks") or ())], strict=True):
        models, pairs = (
            [(f"evaluation.json:{place}{key}.{at}.", one) for at, one in enumerate(found.get(key) or ())]
            for key in ("models", "pairs")
        )
        if not models:
            continue
        metric = str(found.get("metric"))
        form, unit, title = method.form(metric), UNITS.get(metric, ""), method.title(metric).capitalize()
        earlier = ", measured before the run was resumed, of its model then" if found.get("earlier") else ""
        blocks.append(Note(f"{title} on {found.get('examples')} examples of {found.get('data')}{earlier}:"))
        scores = tuple(
            (str(one.get("name")), *(run.number(source + key, form, unit) for key in ("score", "low", "high")))
            for source, one in models
        )
        blocks.append(Table(("model", "score", "from", "to (95 % interval)"), scores))
        if pairs:
            forms = {"better": ",d", "worse": ",d", "p": ".2g"}
            tests = []
            for source, one in pairs:
                numbers = (run.number(source + key, form) for key, form in forms.items())
                tests.append((str(one.get("second")), str(one.get("first")), *numbers))
            blocks.append(
                Table(("model", "compared with", "better on", "worse on", "p (exact paired test)"), tuple(tests))
            )
    if blocks:
        yield Section("Evaluation", tuple(blocks))
