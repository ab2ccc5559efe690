"""The sections with a run's curves over its steps and the numbers behind them, for the whole model and by layer."""

from collections.abc import Iterable, Iterator
from math import isfinite
from typing import TypeGuard

from ...recipe.files import JsonView
from ...recipe.methods import method
from ...recipe.recipe import Recipe
from ...recipe.run_folder import comparable
from ..page import Block, Chart, Curve, HeatMap, Note, Section, Table, number
from ..run_data import Row, RunData

SMOOTHING = 0.9
"""Weight of the previous average at each logged step."""
SMOOTHED_FROM = 20
"""Minimum number of logged steps for a smoothed curve."""
MOST_ROWS = 400
"""Maximum number of logged steps shown as numbers; longer runs show every n-th step, and the last."""
FORMS = {"step": ",d", "tokens": ",d", "loss": ".4f", "learning_rate": ".3g", "seconds": ",.1f", "mfu": ".1%"}
"""Formats of the columns of metrics.jsonl; all others have four digits."""
TITLES = {
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm, before clipping",
    "tokens_per_second": "Tokens per second, all ranks",
    "mfu": "Model FLOPs utilisation",
    "gpu_utilization": "GPU busy (%), rank 0",
}
MORE = (
    *("reward", "kl", "nll_", "odds_", "divergence", "cross_entropy", "router_", "expert_load", "accuracy", "entropy"),
    "completions/mean_length",
)
"""Prefixes of the keys that some methods and models add."""

PAIRS = {
    "preference_accuracy": "preference accuracy (pairs whose better answer is likelier)",
    "preference_margin": "likelihood margin",
    "rewards/accuracies": "implicit reward accuracy (training pairs whose better answer has the higher reward)",
    "rewards/margins": "implicit reward margin, training pairs",
}
"""Names of numbers on pairs where no reward model ranks them: two accuracies that can differ much."""

Points = tuple[tuple[float, float], ...]


def section(run: RunData) -> Section:
    """Return the charts and, folded, the numbers behind them."""
    blocks = [chart.block() for chart in _charts(run) if any(curve.points for curve in chart.curves)]
    charts = [block for block in blocks if isinstance(block, Chart)]
    notes = [block for block in blocks if isinstance(block, Note)] or ([] if charts else [Note("No logged values.")])
    tables = []
    for name, rows in (("metrics.jsonl", run.metrics), ("evaluations.jsonl", run.evaluations)):
        if not rows:
            continue
        every = -(-len(rows) // MOST_ROWS)
        # Values by layer have their own section.
        columns = tuple(dict.fromkeys(key for row in rows for key, value in row.items() if type(value) is not dict))
        cells = tuple(
            tuple(
                number(value, FORMS.get(key, ".4g"), f"{name}:{at}:{key}") or (None if value is None else str(value))
                for key, value in ((key, row.get(key)) for key in columns)
            )
            for at, row in enumerate(rows, 1)
            if (at - 1) % every == 0 or at == len(rows)
        )
        which = f", every {every}th of {len(rows)} rows" if every > 1 else ""
        tables.append(Table(columns, cells, folded=f"The numbers: {name}{which}"))
    return Section("Curves", (*charts, *notes, *tables))


def _charts(run: RunData) -> Iterator[Chart]:
    restarts = tuple(row["from_step"] for row in run.restarts if isinstance(row.get("from_step"), int | float))
    # That of an export of the best step is last.
    evaluations = sorted(comparable(run.evaluations), key=lambda row: row["step"])
    held_out = Curve("held out", points(evaluations, "loss"), dotted=True)
    loss = (*with_smoothed(points(run.metrics, "loss")), held_out)
    yield Chart(run.recipe.method.curve, "step", loss, log=run.recipe.method.packs, marks=restarts)
    for key in (*method.SHARES, "reward"):
        measured = {key: points(evaluations, key), "of a sample": points(evaluations, f"sampled_{key}")}
        if sum(map(len, measured.values())) > 2:  # the verdict has the first and the last
            drawn = tuple(Curve(name, line, dotted=True) for name, line in measured.items() if line)
            yield Chart(f"{named(run.recipe, key)}, held out", "step", drawn)
    for key, title in TITLES.items():
        yield Chart(title, "step", with_smoothed(points(run.metrics, key)), marks=restarts)
    waiting = Curve("waiting for data", tuple(waits(run.metrics)))
    yield Chart("Share of the time spent waiting for data", "step", (waiting,), marks=restarts)
    for key in sorted({key for row in run.metrics for key in row if key.startswith(MORE)})[:8]:
        yield Chart(named(run.recipe, key), "step", with_smoothed(points(run.metrics, key)), marks=restarts)


def named(recipe: Recipe, key: str) -> str:
    """Return the title of a number: on pairs, likelihoods and the rewards that they imply have names of their own."""
    if key == "kl":
        return "KL divergence from the model before training (nats)"
    title = PAIRS.get(key) if recipe.method.examples == "pairs" and not recipe.method.scores else None
    title = title or method.title(key)
    return title[:1].upper() + title[1:]


def points(rows: Iterable[Row], key: str, x: str = "step") -> Points:
    """Return (x, value) for the rows that have a finite number under `key`."""
    found = ((row.get(x), row.get(key)) for row in rows)
    return tuple((at, value) for at, value in found if finite(at) and finite(value))


def finite(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def with_smoothed(line: Points) -> tuple[Curve, ...]:
    """Return a curve, and in front of a long curve its moving average."""
    if len(line) < SMOOTHED_FROM:
        return (Curve("training", line),)
    return Curve("training, each logged step", line, faint=True), Curve("training, smoothed", tuple(smoothed(line)))


def smoothed(line: Points) -> Iterator[tuple[float, float]]:
    """Yield the exponential moving average, with Adam's correction of the bias towards its start."""
    average = 0.0
    for count, (at, value) in enumerate(line, 1):
        average = SMOOTHING * average + (1 - SMOOTHING) * value
        yield at, average / (1 - SMOOTHING**count)


def waits(rows: Iterable[Row]) -> Iterator[tuple[float, float]]:
    """Yield (step, average share of the time since the previous log that ranks waited for data)."""
    before = 0.0
    for row in rows:
        seconds, waited = row.get("seconds"), row.get("data_wait_seconds")
        if finite(seconds) and finite(waited):
            if seconds > before:
                yield row["step"], waited / (seconds - before)
            before = seconds


MOST_CELLS = 3000
"""Maximum number of cells in a heat map, of 130 bytes each; longer runs show every n-th log, and the last."""
MAPS = {
    "grad_norm": "Gradient norm of each layer, before clipping (logarithmic)",
    "update_ratio": "Update as a share of the weights (logarithmic)",
}
LAYER_FORMS = {"grad_norm": ".4g", "update_ratio": ".3g", "dead": ".2%"}
"""The values of a layer with their formats."""
MEANING = (
    "Dead: the share of weights with a gradient of exactly zero, because a unit is off or saturated for every token or "
    "because a token does not occur. An update is usually about a thousandth of the weights."
)

AT_FIRST = (
    "Step 1 of an adapter differs from all others: LoRA's B matrices begin at zero, so its A matrices have no gradient "
    "yet and count as dead, and B's first update is large compared with weights of which half are zero. That is as it "
    "should be."
)


def layer_sections(run: RunData) -> Iterator[Section]:
    """Yield the section, if the run measured its layers."""
    logged = [(at, row) for at, row in enumerate(run.metrics, 1) if _layers(row)]
    if not logged:
        return
    said = []
    still = [row["step"] for _, row in logged if all(one.get("grad_norm") == 0 for one in _layers(row).values())]
    if still:
        said.append(
            f"The gradient of every layer is zero in {len(still)} of {len(logged)} logs, first at step {still[0]}: "
            "these updates taught the model nothing."
        )
    problems: dict[tuple[str, str], list[int]] = {}
    for _, row in logged:
        for name, one in _layers(row).items():
            if one.get("verdict"):
                problems.setdefault((str(one["verdict"]), name), []).append(row["step"])
    for (verdict, name), steps in problems.items():
        count = f"in {len(steps)} of {len(logged)} logs, first at {steps[0]}"
        said.append(f"{verdict.capitalize()} gradient in {name}: {count}.")
    blocks: list[Block] = [Note(" ".join(said) or "No layer's gradient has vanished or exploded.")]
    if run.recipe.lora and logged[0][1]["step"] == 1:
        blocks.append(Note(AT_FIRST))
    names = tuple(dict.fromkeys(name for _, row in logged for name in _layers(row)))
    every = -(-len(logged) * len(names) // MOST_CELLS)
    kept = [row for at, (_, row) in enumerate(logged) if at % every == 0 or at == len(logged) - 1]
    for key, title in MAPS.items():
        values = ((name, (_layers(row).get(name, {}).get(key) for row in kept)) for name in names)
        rows = tuple((name, tuple(one if finite(one) and one > 0 else None for one in line)) for name, line in values)
        if any(value for _, values in rows for value in values):
            blocks.append(HeatMap(title, "step", tuple(row["step"] for row in kept), rows))
    at, last = logged[-1]
    head = ("layer", "gradient norm", "update / weights", "dead", "")
    numbers = []
    for name, one in _layers(last).items():
        place = f"metrics.jsonl:{at}:layers:{name}"
        cells = (number(one.get(key), form, f"{place}:{key}") for key, form in LAYER_FORMS.items())
        numbers.append((name, *cells, str(one.get("verdict") or "")))
    blocks += [Table(head, tuple(numbers)), Note(f"The table is of step {last['step']:,}. {MEANING}")]
    yield Section("Layers", tuple(blocks))


def _layers(row: Row) -> JsonView:
    found = row.get("layers")
    return {name: one for name, one in found.items() if isinstance(one, dict)} if isinstance(found, dict) else {}
