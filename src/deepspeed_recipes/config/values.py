"""Whether a JSON value fits a field's type, by the rules of pydantic's lax mode, which DeepSpeed's typed sections use.

Written out so that the linter needs neither pydantic nor DeepSpeed; a test compares every kind with pydantic.
"""

import json
import math
import re
from typing import Any

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


def fits(kind: dict, value: object) -> bool:
    """Return whether pydantic accepts `value` for this type; the content of a section is not checked."""
    match kind["kind"]:
        case "union":
            return any(fits(inner, value) for inner in kind["of"])
        case "list":
            if not isinstance(value, list) or len(value) != kind.get("length", len(value)):
                return False
            return all(fits(kind["of"], item) for item in value)
        case "literal":
            return any(value == item and type(value) is type(item) for item in kind["values"])
        case "enum":
            return _fits_enum(kind, value)
        case "section" | "object":
            return isinstance(value, dict)
        case "null":
            return value is None
        case "anything":
            return True
        case "nothing":
            return False
        case "bool":
            return _fits_bool(value)
        case "str":
            return isinstance(value, str)
        case "truth":
            return isinstance(value, bool)
        case "whole" | "number":
            right = isinstance(value, int if kind["kind"] == "whole" else (int, float)) and not isinstance(value, bool)
            return right and _in_bounds(kind, value)
        case "int":
            return _fits_int(value) and _in_bounds(kind, value)
        case "float":
            return _fits_float(value) and _in_bounds(kind, value)
    raise AssertionError(f"unknown kind {kind!r}")


def describe(kind: dict) -> str:
    """Return the type in words, for a message."""
    match kind["kind"]:
        case "union":
            return " or ".join(dict.fromkeys(describe(inner) for inner in kind["of"]))
        case "list":
            inner = kind["of"]["kind"]
            of = f"{kind['length']} values, each" if "length" in kind else "values, each"
            return "a list" if inner == "anything" else f"a list of {of} {describe(kind['of'])}"
        case "literal" | "enum":
            return " | ".join(_write(item) for item in kind["values"])
    signs = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    bounds = " and ".join(f"{signs[name]} {kind[name]}" for name in signs if name in kind)
    return f"{_NAMES[kind['kind']]} {bounds}".strip()


def _fits_bool(value: object) -> bool:
    if isinstance(value, str):
        return value.lower() in _TRUTHS
    return isinstance(value, (bool, int, float)) and value in (0, 1)


def _fits_int(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value) and value == int(value) and abs(value) < 2**63
    if isinstance(value, str):
        return _WHOLE_TEXT.fullmatch(value) is not None
    return isinstance(value, int)


def _fits_float(value: object) -> bool:
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return False
        return True
    return isinstance(value, (int, float))


def _fits_enum(kind: dict, value: Any) -> bool:
    if kind["integer"]:
        return _fits_int(value) and float(value) in kind["values"]
    return isinstance(value, str) and value in kind["values"]


def _in_bounds(kind: dict, value: Any) -> bool:
    number = float(value) if isinstance(value, str) else value
    return not (
        ("gt" in kind and not number > kind["gt"])
        or ("ge" in kind and not number >= kind["ge"])
        or ("lt" in kind and not number < kind["lt"])
        or ("le" in kind and not number <= kind["le"])
    )


def _write(value: object) -> str:
    return json.dumps(value)
