"""`training/` in an exported folder: the recipe, the DeepSpeed file and the results of the run that trained it."""

from dataclasses import dataclass
from pathlib import Path

from ...recipe.conversions import from_dict, to_dict
from ...recipe.errors import redacted
from ...recipe.files import Json, JsonView
from ...recipe.recipe import Recipe
from ...recipe.run_folder import RunFolder, read_json, read_jsonl, read_recipe, write_json
from .portable import portable, portable_recipe

FOLDER = "training"
RECIPE, DEEPSPEED, RESULTS = "recipe.json", "deepspeed.json", "results.json"
QUANTIZATION = "quantization"
"""Key in results.json of a quantised copy that describes the quantisation."""
CERTIFICATES = "certificates"
"""Key in results.json: who compared the folder's model with the trained one, and the verdict. A copy starts without."""
RESULT_KEYS = ("metric", "before", "after", "logit_difference", "dequantized")
"""Keys that an export's results take from the run's summary.json."""
PROGRESS = {"steps": "step", "tokens": "tokens", "seconds": "seconds"}
"""Keys that they take from the last object of its metrics.jsonl, with their names there."""


@dataclass(frozen=True)
class Record:
    """The record of a model's training, without paths of the machine that trained it."""

    recipe: Recipe
    results: JsonView
    """`metric`, `before`, `after`, `held_out` (examples), `steps`, `tokens`, `seconds`, and the run's environment."""


def of_run(run: RunFolder, results: JsonView, step: int | None = None) -> Record:
    """Return the record of a run, from its folder.

    Args:
        run: has at least a recipe.json.
        results: content of its summary.json, now or later: `metric`, `before`, `after`.
        step: the step of the recorded checkpoint, or None for the end of the run.
    """
    found = {key: results[key] for key in RESULT_KEYS if results.get(key) is not None}
    logged = [row for row in read_jsonl(run.metrics) if step is None or row["step"] <= step]
    last = logged[-1] if logged else {}
    found |= {name: last[key] for name, key in PROGRESS.items() if key in last}
    held_out = (read_json(run.data).get("held_out") or {}) if run.data.exists() else {}
    if count := results.get("held_out") or held_out.get("examples"):
        found["held_out"] = count
    if run.environment.exists():
        environment = read_json(run.environment)
        environment.pop("started", None)  # the same weights give the same export, whenever it is written
        found["environment"] = portable(environment)
    return Record(portable_recipe(read_recipe(run)), found)


def at_step(run: RunFolder, step: int) -> Json:
    """Return the run's metric before training and after `step` steps, as far as it was measured then."""
    recipe = read_recipe(run)
    metric = recipe.metric
    rows = {row["step"]: row.get(metric) for row in read_jsonl(run.evaluations)}
    return {"metric": metric, "before": rows.get(0), "after": rows.get(step)}


def write(folder: Path, record: Record, deepspeed: Path | None) -> None:
    """Write `training/` into an exported folder; `deepspeed` is the run's resolved file, if it has one."""
    place = folder / FOLDER
    write_json(place / RECIPE, redacted(to_dict(record.recipe)))
    write_json(place / RESULTS, dict(record.results))
    if deepspeed is not None and deepspeed.exists():
        write_json(place / DEEPSPEED, redacted(portable(read_json(deepspeed))))


def add(folder: Path, results: JsonView) -> None:
    """Add results to those of an exported folder, if it has a record; None removes what was there."""
    file = folder / FOLDER / RESULTS
    if file.exists():
        merged = {**read_json(file), **results}
        write_json(file, {name: value for name, value in merged.items() if value is not None})


def read(folder: Path) -> Record | None:
    """Return the record in an exported folder, or None if it has none.

    Raises:
        UserError: it cannot be read.
    """
    place = folder / FOLDER
    if not (place / RECIPE).exists():
        return None
    results = read_json(place / RESULTS) if (place / RESULTS).exists() else {}
    return Record(from_dict(read_json(place / RECIPE)), results)
