"""The keys that DeepSpeed's config has and the values that each key accepts, from the schemas in `schemas/`.

Maintainers derive a schema from DeepSpeed itself (`scripts/maintain/schema`). Keys of sections that DeepSpeed reads
with pydantic have a type (`fits`). All other keys have a list of the kinds of values that DeepSpeed loaded (`accepts`).
Nothing here imports DeepSpeed, pydantic or torch.
"""

import difflib
import json
import math
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

from ..recipe.files import Json
from .read import Key

SCHEMAS = Path(__file__).with_name("schemas")
"""One file per derived version of DeepSpeed, the oldest and the newest that are tested: `deepspeed-0.19.8.json`. Only
the newest is whole; the others list their differences from it (`read`)."""

_TRUTHS = {"0", "off", "f", "false", "n", "no", "1", "on", "t", "true", "y", "yes"}
_WHOLE_TEXT = re.compile(r"\s*[+-]?\d+(_\d+)*(\.0*)?\s*")
_NAMES = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "truth": "true or false, without quotes",
    "whole": "a whole number, without quotes or exponent",
    "number": "a number, without quotes",
    "str": "a string",
    "null": "null",
    "section": "an object",
    "object": "an object",
    "anything": "anything",
    "nothing": "a value that JSON cannot express",
}


def installed_version() -> str | None:
    """Return the version of the installed DeepSpeed without importing it, or None if DeepSpeed is not installed."""
    try:
        return metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return None


def file_of(version: str) -> Path:
    """Return the path of a version's schema, which may not exist."""
    return SCHEMAS / f"deepspeed-{version}.json"


@cache
def load() -> Json:
    """Return the schema of the installed DeepSpeed, or the newest schema if DeepSpeed is not installed.

    A version without a schema gets that of the nearest version, and a warning on stderr names both.
    """
    shipped = {position(file.stem.removeprefix("deepspeed-")): file for file in SCHEMAS.glob("*.json")}
    installed = installed_version()
    wanted = position(installed) if installed else max(shipped)
    schema = read(shipped[min(shipped, key=lambda known: (abs(known - wanted), -known))])
    if wanted not in shipped:
        print(
            f"warning: no schema for DeepSpeed {installed}: its configs are checked against the keys of DeepSpeed "
            f"{schema['deepspeed']}.",
            file=sys.stderr,
        )
    return schema


def read(file: Path) -> Json:
    """Return the schema in a file; if the file lists differences from another version, they are applied to that."""
    found: Json = json.loads(file.read_text(encoding="utf-8"))
    if "differs_from" not in found:
        return found
    schema = read(file_of(found["differs_from"]))
    for path, *value in found["differences"]:
        *parents, name = path
        node = schema
        for parent in parents:
            node = node[parent]
        if value:
            (node[name],) = value
        else:  # a path alone: the other version has no such entry
            del node[name]
    return schema


def position(version: str) -> int:
    """Return a version's place on a line, 1908 for 0.19.8; a suffix such as `+cu130` or `.dev1` is ignored."""
    numbers = [int(number) for number in re.findall(r"\d+", re.split(r"[^\d.]", version)[0])]
    major, minor, patch = [*numbers, 0, 0, 0][:3]
    return (major * 100 + minor) * 100 + patch


def entry(path: Key) -> Json:
    """Return the schema's entry for the key at `path`, empty if there is none."""
    node: Json | None = load()["root"]
    for name in path[:-1]:
        node = node and node["keys"].get(name, {}).get("section")
    found: Json = node["keys"].get(path[-1], {}) if node else {}
    return found


def walk(config: Json, node: Json | None = None, path: Key = ()) -> Iterator[tuple[Key, object, Json]]:
    """Yield every key of a config with its value and the schema node of its section, each section before its keys."""
    node = node or load()["root"]
    for name, value in config.items():
        yield (*path, name), value, node
        inner = node["keys"].get(name, {}).get("section")
        if isinstance(value, dict) and inner:
            yield from walk(value, inner, (*path, name))


def nearest(name: str, known: tuple[str, ...]) -> str | None:
    """Return the known key that `name` is a misspelling of, compared without case, `-` and `_`, or None.

    Takes microseconds, since a file may have 60,000 unknown keys.
    """
    if name.startswith(("_", "/", "#")) or "comment" in name.lower():
        return None  # a comment, not a misspelt `comet`
    wanted = name.lower().replace("_", "").replace("-", "").replace(" ", "")
    if len(wanted) > 100:
        return None  # more than twice as long as the longest key
    letters, length = _letters(wanted), len(wanted)
    # Two names that are 80 % alike differ in at most a fifth of their letters. This test excludes nearly all keys, a
    # hundred times faster than difflib, and excludes no key that difflib would find.
    candidates = {
        plain: key for plain, key, others, size in _plain(known) if 5 * (letters ^ others).bit_count() <= length + size
    }
    close = difflib.get_close_matches(wanted, candidates, n=1, cutoff=0.8) if candidates else []
    return candidates[close[0]] if close else None


@cache
def _plain(known: tuple[str, ...]) -> list[tuple[str, str, int, int]]:
    """Return each key without `_`, as it is, its letters, and their number."""
    return [(plain := key.lower().replace("_", ""), key, _letters(plain), len(plain)) for key in known]


def _letters(word: str) -> int:
    """Return the characters of a word as bits, one for its first `a`, another for its second; some share bits."""
    bits = 0
    for character in word:
        bit = 1 << (ord(character) & 63)
        while bits & bit:
            bit <<= 64
        bits |= bit
    return bits


def kind_of(value: object) -> str:
    """Return the kind of `value`, as an untyped key's `loads` names it.

    Falsy and truthy values are separate kinds, since DeepSpeed often tests only for emptiness.
    """
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


def accepts(entry: Json, value: object) -> bool:
    """Return whether DeepSpeed loads a config that has `value` for an untyped key; a section's keys are ignored."""
    if "loads" not in entry or kind_of(value) in entry["loads"]:
        return True
    if isinstance(value, dict) and "section" in entry and "empty object" in entry["loads"]:
        return True
    if isinstance(value, str) and "texts" in entry:
        return value in entry["texts"] or (entry["any_case"] and value.lower() in entry["texts"])
    return False


def fits(kind: Json, value: object) -> bool:
    """Return whether a typed key accepts `value`; the keys of a section are ignored.

    The rules are those of pydantic's lax mode, which DeepSpeed's typed sections use; a test compares every kind with
    pydantic.
    """
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    match kind["kind"]:
        case "union":
            return any(fits(inner, value) for inner in kind["of"])
        case "list":
            if not isinstance(value, list) or len(value) != kind.get("length", len(value)):
                return False
            return all(fits(kind["of"], item) for item in value)
        case "literal":
            return any(value == item and type(value) is type(item) for item in kind["values"])
        case "enum" if kind["integer"]:
            return _fits_int(value) and float(value) in kind["values"]  # type: ignore[arg-type]
        case "enum":
            return isinstance(value, str) and value in kind["values"]
        case "section" | "object":
            return isinstance(value, dict)
        case "null":
            return value is None
        case "anything":
            return True
        case "nothing":
            return False
        case "bool":
            if isinstance(value, str):
                return value.lower() in _TRUTHS
            return isinstance(value, (bool, int, float)) and value in (0, 1)
        case "str":
            return isinstance(value, str)
        case "truth":
            return isinstance(value, bool)
        case "whole":
            return isinstance(number, int) and _in_bounds(kind, number)
        case "number":
            return number is not None and _in_bounds(kind, number)
        case "int":
            return _fits_int(value) and _in_bounds(kind, value)
        case "float":
            if isinstance(value, str):
                try:
                    float(value)
                except ValueError:
                    return False
            return isinstance(value, (int, float, str)) and _in_bounds(kind, value)
    raise AssertionError(f"unknown kind {kind!r}")


def _fits_int(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value) and value == int(value) and abs(value) < 2**63
    if isinstance(value, str):
        return _WHOLE_TEXT.fullmatch(value) is not None
    return isinstance(value, int)


def _in_bounds(kind: Json, value: object) -> bool:
    number = float(value) if isinstance(value, str) else value
    return not (
        ("gt" in kind and not number > kind["gt"])
        or ("ge" in kind and not number >= kind["ge"])
        or ("lt" in kind and not number < kind["lt"])
        or ("le" in kind and not number <= kind["le"])
    )


def describe(kind: Json) -> str:
    """Return a type in words, for a message."""
    match kind["kind"]:
        case "union":
            return " or ".join(dict.fromkeys(describe(inner) for inner in kind["of"]))
        case "list":
            inner = kind["of"]["kind"]
            of = f"{kind['length']} values, each" if "length" in kind else "values, each"
            return "a list" if inner == "anything" else f"a list of {of} {describe(kind['of'])}"
        case "literal" | "enum":
            return " | ".join(json.dumps(item) for item in kind["values"])
    signs = {"gt": "above", "ge": "of at least", "lt": "below", "le": "of at most"}
    bounds = " and ".join(f"{signs[name]} {kind[name]}" for name in signs if name in kind)
    name, *form = _NAMES[kind["kind"]].split(", ")
    return ", ".join([f"{name} {bounds}".strip(), *form])
