"""The sections with the recipe compared with its page, the DeepSpeed file, versions, and restarts."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any

from ...recipe import pages
from ...recipe.bounds import typed
from ...recipe.conversions import to_dict
from ...recipe.errors import UserError, redact
from ...recipe.files import Json
from ...recipe.overrides import override_keys, value_of
from ...recipe.recipe import Recipe, names
from ..page import Chart, Code, Curve, Note, Section, Table, number
from ..run_data import RunData
from .curves import finite, points


def recipe(run: RunData) -> Section:
    """Return the keys whose values differ from those on the recipe's page, and the whole recipe."""
    page = of_page(run.recipe)
    changed = tuple(explained(page, run.recipe)) if page else ()
    if page is None:
        compared = ": not compared with its page, which is outside the project or no longer has this recipe."
    else:
        compared = ", with these changes:" if changed else ", unchanged from its page."
    blocks = (
        Note(f"{pages.typed(run.recipe)} {run.recipe.variant}{compared}"),
        *((Table(("key", "page", "this run"), changed),) if changed else ()),
        *((Code("command.txt", run.command),) if run.command else ()),
        Code("recipe.json", redact(json.dumps(to_dict(run.recipe), indent=2))),
    )
    return Section("Recipe", blocks)


def of_page(recipe: Recipe) -> Recipe | None:
    """Return the recipe as it is on its page now, or None if the page lacks it or is outside the project.

    A page outside the project is Python code named by a run folder; showing the folder must not run it.
    """
    if recipe.page or recipe.family not in pages.families():
        return None
    try:
        return pages.find(f"{recipe.family}-{recipe.size}", recipe.variant)
    except UserError:
        return None


def differences(before: Recipe, after: Recipe) -> Iterator[tuple[str, str, str]]:
    """Yield (key, value before, value after) for the override keys that differ.

    A path that the launcher made absolute counts as equal to the page's path.
    """
    left, right = values(before), values(after)
    for key in [*left, "draft.enabled"]:
        old, new = left.get(key, before.draft.enabled), right.get(key, after.draft.enabled)
        if old == new:
            continue
        if isinstance(old, str) and isinstance(new, str) and len(names(old)) == len(names(new)):
            pairs = [(PurePath(one), PurePath(other)) for one, other in zip(names(old), names(new), strict=True)]
            if all(other.is_absolute() and other.parts[-len(one.parts) :] == one.parts for one, other in pairs):
                continue
        yield key, redact(typed(old)), redact(typed(new))


def explained(before: Recipe, after: Recipe) -> Iterator[tuple[str, str, str]]:
    """Yield `differences`, with the meaning of the values that follow from data of the user's own."""
    remarks = {
        ("data.validation", "none"): "data.validation_share holds out examples" if after.data.validation_share else "",
        ("data.validation_share", "auto"): "5 %, and at most 500 examples",
    }
    if (before.data.path, before.data.validation) != (after.data.path, after.data.validation):
        remarks["data.metric", "loss"] = f"the page's {before.data.metric} is for its own examples"
    for key, old, new in differences(before, after):
        remark = remarks.get((key, new))
        yield key, old, f"{new} ({remark})" if remark else new


def values(recipe: Recipe) -> Json:
    """Return a recipe's value for each override key."""
    return {key: value_of(recipe, key) for key in override_keys()}


def deepspeed(run: RunData) -> Section:
    """Return the DeepSpeed configuration that was passed to the engine."""
    if not run.deepspeed:
        return Section("DeepSpeed", (Note("No deepspeed.json: the run ended before it created the engine."),))
    about = Note(f"From {run.recipe.deepspeed}; deepspeed.json has every value as passed to the engine.")
    return Section("DeepSpeed", (about, Code("deepspeed.json", redact(json.dumps(run.deepspeed, indent=2)))))


def versions(run: RunData) -> Section:
    """Return the versions of packages, and the hardware."""
    packages = run.environment.get("packages") or {}
    rows = [(name, typed(version)) for name, version in packages.items()]
    for name, value in run.environment.items():
        if name != "packages" and value not in (None, []):
            text = ", ".join(map(str, value)) if isinstance(value, list) else typed(value)
            rows.append((name.replace("_", " "), text))
    rows.append(("run folder", str(run.folder.path)))
    return Section("Versions and hardware", (Table(("", ""), tuple(rows)),))


def restarts(run: RunData) -> Section:
    """Return the section on restarts and rewinds: a table, and a chart that marks them in the run's progress."""
    if not run.restarts:
        return Section("Restarts and failures", (Note("No automatic restarts."),))
    rows = []
    for index, row in enumerate(run.restarts, 1):
        step, ranks = (number(row.get(key), "d", f"restarts.jsonl:{index}:{key}") for key in ("from_step", "ranks"))
        rows.append((moment(row.get("time")), step, ranks, str(row.get("cause") or "rewound")))
    table = Table(("time (UTC)", "resumed after step", "ranks", "cause"), tuple(rows))
    steps = points(run.metrics, "step", "seconds")
    resumed = (row.get("from_step") for row in run.restarts)
    marks = tuple(max((at for at, step in steps if step <= one), default=0.0) for one in resumed if finite(one))
    chart = Chart("Steps over training time", "second", (Curve("steps", steps),), marks=marks)
    return Section("Restarts and failures", (table, chart.block()))


def moment(seconds: Any) -> str | None:
    """Return a Unix time as date and time in UTC."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (TypeError, ValueError, OverflowError, OSError):
        return None
