"""The keys and values that the installed DeepSpeed accepts in its JSON, derived from DeepSpeed itself.

`derive` imports DeepSpeed (about 3 s) and learns the schema in two ways:

- sections that DeepSpeed reads with pydantic declare their keys and types;
- all other keys are found by passing `DeepSpeedConfig` a dictionary that records what is looked up in it, and what
  they accept is found by trying one value of each kind.

The linter uses `load`. The schema of the tested DeepSpeed version is in `schema.json` beside this file (a test derives
it again and compares); for any other version it is derived once and kept in the user's cache folder.
"""

import contextlib
import json
import os
from functools import cache
from importlib import metadata
from pathlib import Path

from ..recipe import files
from ..recipe.errors import UserError
from .schema_format import FORMAT, SHIPPED
from .schema_format import SAMPLES as SAMPLES

OLDEST = "0.18.9"
"""The oldest DeepSpeed whose schema has been derived; before 0.19.7 it does not say which keys it has removed."""


def installed_version() -> str | None:
    """Return the installed DeepSpeed's version without importing it; None if it is not installed."""
    try:
        return metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return None


@cache
def load() -> dict:
    """Return the schema of the installed DeepSpeed, or of the tested version if none is installed.

    Raises:
        UserError: the installed DeepSpeed lacks what the schema is learned from.
    """
    shipped = json.loads(SHIPPED.read_text())
    version = installed_version()
    if version is None or version == shipped["deepspeed"]:
        return shipped
    kept = _cache_folder() / f"deepspeed-{version}-schema-{FORMAT}.json"
    try:
        return json.loads(kept.read_text())
    except (OSError, ValueError):
        schema = _derived(version, shipped["deepspeed"])
        _keep(kept, schema)
        return schema


def _derived(version: str, tested: str) -> dict:
    from .derive import derive

    try:
        return derive()
    except (AttributeError, ImportError) as error:
        raise UserError(
            f"DeepSpeed {version} is not supported ({error}): install {OLDEST} to {tested}, or lint in an environment "
            f"without DeepSpeed, which judges by {tested}."
        ) from None


def kind_of(value: object) -> str:
    """Return which of the kinds in SAMPLES `value` is."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return "zero" if value == 0 else "one" if value == 1 else "integer"
    if isinstance(value, float):
        return "fraction" if value else "zero point"
    if isinstance(value, str):
        return "auto" if value == "auto" else "text" if value else "empty text"
    if isinstance(value, (list, tuple)):
        texts = all(isinstance(item, str) for item in value)
        return "empty list" if not value else "list of text" if texts else "list"
    return "object" if value else "empty object"


def accepts(entry: dict, value: object) -> bool:
    """Return whether DeepSpeed loads a config that has `value` for an untyped key; a section is not looked into."""
    if "loads" not in entry or kind_of(value) in entry["loads"]:
        return True
    if isinstance(value, dict) and "section" in entry and "empty object" in entry["loads"]:
        return True
    if isinstance(value, str) and "texts" in entry:
        return value in entry["texts"] or (entry["any_case"] and value.lower() in entry["texts"])
    return False


def section(*path: str | int) -> dict | None:
    """Return the node of the section at `path` (`section("zero_optimization", "offload_param")`), or None."""
    node = load()["root"]
    for name in path:
        node = node["keys"].get(name)
        node = node and node.get("section")
        if node is None:
            return None
    return node


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "deepspeed-recipes"


def _keep(path: Path, schema: dict) -> None:
    with contextlib.suppress(OSError):  # a read-only home costs only 3 s per run
        files.write_text(path, json.dumps(schema))  # two ranks may write at once
