"""What the installed DeepSpeed reads from its JSON, taken from DeepSpeed itself.

`derive` imports DeepSpeed (about 3 s) and learns the schema in two ways:

- sections that DeepSpeed reads with pydantic say themselves which keys and types they have;
- all other keys are found by handing `DeepSpeedConfig` a dictionary that writes down what is looked up in it,
  and what they accept is found by trying one value of each kind.

`load` is what the linter uses: the result for the version the project is tested with lies in `schema.json`
beside this file (a test derives it again and compares); for any other version it is derived once and kept in
the user's cache folder under that version's name.
"""

import json
import os
from functools import cache
from importlib import metadata
from pathlib import Path

SHIPPED = Path(__file__).with_name("schema.json")
FORMAT = 1

# One value of each kind that JSON has, falsy and truthy apart: DeepSpeed often asks only "is it empty".
SAMPLES = {
    "null": None,
    "false": False,
    "true": True,
    "zero": 0,
    "one": 1,
    "integer": 3,
    "zero point": 0.0,
    "fraction": 2.5,
    "empty text": "",
    "text": "x",
    "auto": "auto",
    "empty list": [],
    "list of text": ["x"],
    "list": [[1]],
    "empty object": {},
    "object": {"x": 1},
}


def installed_version() -> str | None:
    """Return the installed DeepSpeed's version without importing it; None when it is not installed."""
    try:
        return metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return None


@cache
def load() -> dict:
    """Return the schema of the installed DeepSpeed (of the shipped version when none is installed)."""
    shipped = json.loads(SHIPPED.read_text())
    version = installed_version()
    if version is None or version == shipped["deepspeed"]:
        return shipped
    kept = _cache_folder() / f"deepspeed-{version}-schema-{FORMAT}.json"
    try:
        return json.loads(kept.read_text())
    except (OSError, ValueError):
        from recipes.zero_config.derive import derive

        schema = derive()
        _keep(kept, schema)
        return schema


def kind_of(value: object) -> str:
    """Return the name in SAMPLES of the kind that `value` is of."""
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


def section(*path: str) -> dict | None:
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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(schema))
        temporary.replace(path)  # two ranks may write at once: a reader never sees half a file
    except OSError:
        pass  # a read-only home costs 3 s per run, nothing else
