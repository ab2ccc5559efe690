"""The override keys for `ds-recipes launch --help`: type, default and meaning, read from the `recipe` package."""

import ast
import dataclasses
import functools
import inspect
import sys
import textwrap
import types
import typing
from typing import Any

from ...recipe import compatibility, overrides
from ...recipe.conversions import dataclass_in
from ...recipe.errors import UserError
from ...recipe.methods import METHODS
from ...recipe.recipe import Recipe

WIDTH = 100


@dataclasses.dataclass(frozen=True)
class Key:
    """An override key."""

    name: str
    kind: str
    """The key's type, for display."""
    default: str
    """The default if the page sets none."""
    meaning: str
    """The field's documentation, as one paragraph."""

    def short(self) -> str:
        """Return name, type, default and the first sentence of the meaning."""
        first = self.meaning.partition(". ")[0].removesuffix(".")
        about = textwrap.shorten(first, WIDTH, placeholder=" ...", break_on_hyphens=False)
        return f"  {self.name:<27} {self.kind}{self._default()}\n      {about}"

    def long(self) -> str:
        """Return name, type, default, the whole meaning, and the settings that exclude the key."""
        meaning = textwrap.indent(textwrap.fill(self.meaning, WIDTH), "    ")
        refused = (f"refused: {line}" for line in compatibility.beside(self.name))
        lines = [textwrap.fill(f"    {line}", WIDTH, subsequent_indent="      ") for line in refused]
        return "\n".join([f"{self.name}: {self.kind}{self._default()}", meaning, *lines])

    def _default(self) -> str:
        return f" (default: {self.default})" if self.default else ""


def overview() -> str:
    """Return all keys, for the end of --help."""
    head = "override keys (--help KEY explains one; a page may set another default, which --dry-run prints):"
    return "\n".join([head, *(key.short() for key in keys().values())])


def explained(word: str) -> str:
    """Return the explanation of a key, or of each key of a section such as `lora`.

    Raises:
        UserError: there is no such key; names the nearest.
    """
    known = keys()
    found = [known[word]] if word in known else [key for name, key in known.items() if name.startswith(f"{word}.")]
    if not found:
        raise UserError(overrides.unknown(word, list(known)))
    return "\n".join(key.long() for key in found)


def keys() -> dict[str, Key]:
    """Return every override key, in the order of the fields."""
    found = {}
    for name, hint in overrides.override_keys().items():
        section, _, field = name.rpartition(".")
        owner = METHODS.get(section) or (dataclass_in(typing.get_type_hints(Recipe)[section]) if section else Recipe)
        assert owner is not None, name
        meaning = _meanings(owner.__module__)[owner.__name__].get(field, "")
        found[name] = Key(name, type_name(hint), _default(owner, field), meaning)
    return found


def type_name(hint: Any) -> str:
    """Return a field's type for display: `true | false | selective | feed_forward`."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " | ".join(type_name(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(typing.get_args(hint))
    return {bool: "true | false", int: "whole number", float: "number", str: "text", type(None): "none"}[hint]


def _default(owner: type, field: str) -> str:
    default = next(one.default for one in dataclasses.fields(owner) if one.name == field)
    if default is dataclasses.MISSING:
        return ""
    return str(default).lower() if default is None or isinstance(default, bool) else str(default)


@functools.cache
def _meanings(module: str) -> dict[str, dict[str, str]]:
    """Return the documentation below each field of a module's classes, by class and field."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = {}
            for field, below in zip(node.body, node.body[1:], strict=False):
                text = below.value if isinstance(below, ast.Expr) else None
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Constant):
                    found[node.name][ast.unparse(field.target)] = " ".join(str(text.value).split())
    return found
