"""Checks that a field's value has its type and, if it is a number, lies within the bounds declared with the field."""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple
from unicodedata import category

from .errors import UserError, redact


@dataclass(frozen=True)
class Bounds:
    """A number's bounds: `Annotated[float, Bounds(least=0, below=1)]`."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    usual: float | None = None
    """The value that a message suggests."""
    zero: bool = False
    """True if 0, which turns something off, is allowed too."""
    steps: bool = False
    """True if values from 1 on are whole numbers of steps; below 1 they are shares."""

    def broken_by(self, value: float) -> bool:
        """Return True if a number is out of bounds."""
        if value == 0 and self.zero:
            return False
        return (
            (self.steps and value > 1 and value != int(value))
            or (self.least is not None and value < self.least)
            or (self.above is not None and value <= self.above)
            or (self.most is not None and value > self.most)
            or (self.below is not None and value >= self.below)
        )

    def __str__(self) -> str:
        words = (("at least", self.least), ("above", self.above), ("at most", self.most), ("below", self.below))
        bounds = " and ".join(f"{word} {_number(bound)}" for word, bound in words if bound is not None)
        bounds += ", or 0" if self.zero else ", and from 1 on a whole number of steps" if self.steps else ""
        return bounds if self.usual is None else f"{bounds}, for instance {_number(self.usual)}"


class Several:
    """Marks a text field that holds several values, separated by commas: `Annotated[str, Several()]`."""


_LARGEST = {int: 2**31 - 1, float: 3e38}
"""Upper bounds of numbers that declare none: the largest 32-bit values, with which torch and DeepSpeed compute."""


def check(section: object, prefix: str = "") -> None:
    """Refuse values of a dataclass and its nested dataclasses that have the wrong type or are out of bounds."""
    kind: object = type(section)
    for name, nested, kinds, words, bounds, several in _fields(kind):
        value, key = getattr(section, name), prefix + name
        if value is None and type(None) in kinds:
            continue
        if nested:
            if not isinstance(value, nested):
                none = " or None" if type(None) in kinds else ""
                raise UserError(f"{key}={shown(repr(value))}: must be {nested.__name__}(...){none}.")
            check(value, f"{getattr(value, 'name', key) if name == 'method' else key}.")  # `method` holds `dpo.beta`
        elif isinstance(value, str) and value in words:
            continue
        elif isinstance(value, bool):
            if bool not in kinds:
                _refuse(key, value, kinds, words)
        elif isinstance(value, int | float) and {int, float} & {*kinds}:
            if isinstance(value, float) and float not in kinds:
                _refuse(key, value, kinds, words)
            if not math.isfinite(value):
                raise UserError(f"{key}={value}: must be a finite number.")
            if bounds and bounds.broken_by(value):
                raise UserError(f"{key}={shown(value)}: must be {bounds}.")
            largest = _LARGEST[float if float in kinds else int]
            if abs(value) > largest and not (bounds and (bounds.below or bounds.most)):
                side = f"at most {largest}" if value > 0 else f"at least {-largest}"
                raise UserError(f"{key}={shown(value)}: must be {side}.")
        elif isinstance(value, str) and str in kinds:
            odd = "" if value.isprintable() else next((one for one in value if category(one) in ("Cc", "Cs")), "")
            if odd:
                raise UserError(f"{key}={shown(value)}: has the control character {odd!r}; leave it out.")
            if several and value and not value.strip(", "):
                raise UserError(f"{key}={shown(value)}: names nothing; leave it out, or separate values with commas.")
        elif not (isinstance(value, Mapping) and Mapping in kinds):
            _refuse(key, value, kinds, words)


def typed(value: object) -> str:
    """Return a value as it is typed on a command line."""
    if isinstance(value, float) and value.is_integer():
        return f"{value:.17g}"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def shown(value: object) -> str:
    """Return a value for a message: as typed on a command line, without secrets and cut to 80 characters."""
    text = typed(value)
    text = redact(text if text.isprintable() else ascii(text)[1:-1])
    return text if len(text) <= 80 else f"{text[:77]}..."


def expected(kinds: tuple[type, ...], words: tuple[str, ...] = ()) -> str:
    """Return a description of the allowed values: those of the types `kinds`, and the words in `words`."""
    names = {int: "a whole number, e.g. 8", float: "a number, e.g. 5e-5", bool: "true or false", str: "text"}
    if kinds and all(kind is type(None) for kind in kinds):
        kinds = ()
    allowed = [names.get(kind, kind.__name__) for kind in kinds if kind is not type(None)]
    if words and not allowed:
        return f"one of {', '.join(words)}"
    return " or ".join([*allowed, *words])


def _refuse(key: str, value: object, kinds: tuple[type, ...], words: tuple[str, ...]) -> None:
    # As in Python: `'8'` and `8.0` are refused for their type, which `8` would hide.
    raise UserError(f"{key}={shown(repr(value))}: must be {expected(kinds, words)}.")


def _number(bound: float) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


class _Field(NamedTuple):
    """A field's name, its declared dataclass (or None), types, literal words and bounds, and if it is `Several`."""

    name: str
    nested: type | None
    kinds: tuple[type, ...]
    words: tuple[str, ...]
    bounds: Bounds | None
    several: bool


@cache
def _fields(kind: Any) -> list[_Field]:
    found = []
    hints = typing.get_type_hints(kind, include_extras=True)
    for name, hint in ((field.name, hints[field.name]) for field in dataclasses.fields(kind)):
        declared: tuple[Any, ...] = ()
        if typing.get_origin(hint) is typing.Annotated:
            hint, *declared = typing.get_args(hint)  # type: ignore[assignment]
        options = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
        words = tuple(word for one in options if typing.get_origin(one) is Literal for word in typing.get_args(one))
        kinds = tuple(typing.get_origin(one) or one for one in options if typing.get_origin(one) is not Literal)
        nested = next((one for one in kinds if isinstance(one, type) and dataclasses.is_dataclass(one)), None)
        bounds = next((one for one in declared if isinstance(one, Bounds)), None)
        several = any(isinstance(one, Several) for one in declared)
        found.append(_Field(name, nested, kinds, words, bounds, several))
    return found
