"""`training/` in an exported folder: the run's recipe, DeepSpeed file and results, without paths of this machine."""

import re
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from ...recipe.conversions import from_dict, to_dict
from ...recipe.errors import redacted
from ...recipe.files import JsonView
from ...recipe.project import CONFIGS, PACKAGE
from ...recipe.recipe import Recipe, names
from ...recipe.run_folder import RunFolder, read_json, read_jsonl, read_recipe, write_json

_SNAPSHOT = re.compile(r"/(?:models|datasets)--([^/]+?)--([^/]+)/snapshots/[0-9a-f]+/?$")
"""Path of a repository in Hugging Face's cache."""
_OWN = PurePath("src", "deepspeed_recipes")
"""Path of the package in a checkout, whatever the checkout's folder is."""
_BEFORE = ("recipes", "samples")
"""The samples' place in exports from before the package moved out of `recipes/`."""


def portable(value: object) -> Any:
    """Return JSON-like values in which no string is an absolute path, or a list of these with commas."""
    if isinstance(value, dict):
        return {key: portable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [portable(inner) for inner in value]
    if isinstance(value, str) and any(PurePath(name).is_absolute() for name in names(value)):
        return ",".join(portable_path(name) for name in names(value))
    return value


def portable_path(path: str) -> str:
    """Return a path that is the same on every machine.

    A file of the project gets its place in a checkout, a file of `configs/` its name, a file in Hugging Face's cache
    its Hub id, and any other file its name alone; a relative path and a Hub id are unchanged.
    """
    place = Path(path)
    if not place.is_absolute():
        return path
    if cached := _SNAPSHOT.search(path):
        return f"{cached[1]}/{cached[2]}"
    if place.parent == CONFIGS:
        return place.name
    for folder, name in ((CONFIGS, "configs"), (PACKAGE, _OWN)):
        if place.is_relative_to(folder):
            return str(PurePath(name) / place.relative_to(folder))
    return place.name


def portable_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe with portable paths."""
    return from_dict(portable(to_dict(recipe)))


def own_path(path: str) -> Path | None:
    """Return the file of a portable path `src/deepspeed_recipes/...`, or None if it does not exist."""
    place = PurePath(path)
    if place.parts[:2] == _BEFORE:
        place = _OWN / place.relative_to(_BEFORE[0])
    inside = PACKAGE / place.relative_to(_OWN) if place.is_relative_to(_OWN) else None
    return inside if inside is not None and inside.exists() else None


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
    """Return the record of a run, from its folder; `results` is the content of its summary.json, now or later.

    `step` is that of the recorded checkpoint, or None for the end of the run.
    """
    found = {key: results[key] for key in RESULT_KEYS if results.get(key) is not None}
    logged = [row for row in read_jsonl(run.metrics) if step is None or row["step"] <= step]
    last = logged[-1] if logged else {}
    found |= {name: last[key] for name, key in PROGRESS.items() if key in last}
    held_out = read_json(run.data, {}).get("held_out") or {}
    if count := results.get("held_out") or held_out.get("examples"):
        found["held_out"] = count
    if run.environment.exists():
        environment = read_json(run.environment)
        environment.pop("started", None)  # the same weights give the same export, whenever it is written
        found["environment"] = portable(environment)
    return Record(portable_recipe(read_recipe(run)), found)


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
    """Return the record in an exported folder, or None if it has none."""
    place = folder / FOLDER
    if not (place / RECIPE).exists():
        return None
    results = read_json(place / RESULTS, {})
    return Record(from_dict(read_json(place / RECIPE)), results)
