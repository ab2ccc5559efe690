"""A strict JSON parser with the line and column of every key, for hand-written configs.

Python's own parser keeps the last of two equal keys, accepts NaN, and stops at the first mistake without naming the
key. DeepSpeed (hjson) and the Trainer (json) also treat comments and duplicate keys differently, so that a file may
load in one and fail in the other. This parser reports each such problem with its line and column, continues if it can,
and never recurses: 10,000 nested brackets give one message instead of a stack overflow.
"""

import json
import re
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

from ..recipe.errors import UserError, of_system
from ..recipe.files import Json
from ..recipe.project import CONFIGS

MAX_DEPTH = 64  # the deepest real config has six levels
MAX_BYTES = 4 * 1024 * 1024  # the largest real config is under 10 kB; more is not a config

Key = tuple[str | int, ...]

_SPACE = re.compile(r"[ \t\r\n]+")
_COMMENT = re.compile(r"//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"')
_NUMBER = re.compile(r"-?(?:0|[1-9]\d{0,400})(?:\.\d{1,400})?(?:[eE][+-]?\d{1,6})?(?![\w.])")
_WORD = re.compile(r"[+-]?[A-Za-z_][A-Za-z0-9_]*")
_WORDS = {"true": True, "false": False, "null": None}
_NOT_NUMBERS = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}
_FOREIGN_WORDS = {"True": True, "False": False, "None": None}


class Unreadable(UserError):
    """The file is not a JSON object; the message gives the position and the reason in one line."""

    stopped = "cannot be read"

    def __init__(self, what: str, line: int = 1, column: int = 1, file: str = ""):
        super().__init__(what)
        self.what, self.line, self.column, self.file = what, line, column, file

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}: {self.what}" if self.file else self.what


class Unwritable(Unreadable):
    """The fixed file cannot be written."""

    stopped = "cannot be fixed"


@dataclass(frozen=True)
class Problem:
    """A violation of strict JSON whose meaning is clear, so that parsing continues after it."""

    kind: str
    """`duplicate`, `comment`, `not-a-number`, `trailing-comma`, `missing-comma` or `python-word`."""
    key: Key
    line: int
    column: int
    value: object
    what: str
    at: int
    """Offset in the text."""


@dataclass(frozen=True)
class Span:
    """The offsets of a key, or of a list item, and of its value in the text."""

    start: int
    name_end: int
    """The end of the key's name; equal to `start` for a list item."""
    value: int
    end: int


@dataclass(frozen=True)
class Document:
    """A parsed file: its value, the position of each key, and its violations of strict JSON."""

    value: Json
    places: dict[Key, tuple[int, int]]
    """Line and column (from 1) of each key, or of each list item."""
    problems: tuple[Problem, ...]
    text: str
    spans: dict[Key, Span]
    """The span of each key and list item; () has the span of the whole file."""
    comments: dict[int, int]
    """Start and end of each comment."""


def located(name: str) -> Path:
    """Return the path itself or, if it does not exist, the file of that name in configs/, with or without .json."""
    shipped = CONFIGS / (name if name.endswith(".json") else f"{name}.json")
    return shipped if shipped.is_file() and not Path(name).exists() else Path(name)


def read(path: str | Path) -> Document:
    """Parse the file at `path`; raise `Unreadable` if it does not exist or is no JSON object."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        return parse(data)
    except OSError as error:
        raise Unreadable(of_system(error, path).removeprefix(f"{path}: ").removesuffix("."), file=str(path)) from None
    except ValueError as error:  # the name contains a NUL
        raise Unreadable(str(error), file=str(path)) from None
    except Unreadable as error:
        raise Unreadable(error.what, error.line, error.column, str(path)) from None


def parse(data: bytes | str) -> Document:
    """Parse `data`, which is UTF-8; raise `Unreadable`, with line and column, if it is no JSON object."""
    if len(data) > MAX_BYTES:
        raise Unreadable(f"larger than {MAX_BYTES // 2**20} MiB, which no DeepSpeed config is")
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        column = error.start - error.object.rfind(b"\n", 0, error.start)
        byte = error.object[error.start]
        raise Unreadable(f"byte 0x{byte:02x} is not UTF-8 text", line, column) from None
    if text.startswith("\ufeff"):
        raise Unreadable("the file starts with a byte order mark; save it as UTF-8 without BOM")
    if not text.strip():
        raise Unreadable("the file is empty")
    return _Parser(text).document()


class _Parser:
    """Parses the text in one pass, with an explicit stack of open objects and lists."""

    def __init__(self, text: str):
        self.text = text
        self.at = 0
        self.places: dict[Key, tuple[int, int]] = {}
        self.problems: list[Problem] = []
        self.spans: dict[Key, Span] = {}
        self.comments: dict[int, int] = {}
        self.names: dict[Key, tuple[int, int]] = {}
        self.line_starts = [0] + [found.end() for found in re.finditer("\n", text)]

    def document(self) -> Document:
        value = self._value()
        self._skip(())
        if self.at < len(self.text):
            raise self._stop("text after the end of the config", self.at)
        if not isinstance(value, dict):
            names = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
            raise Unreadable(f"expected an object in braces, found {names.get(type(value), 'a number')}")
        return Document(value, self.places, tuple(self.problems), self.text, self.spans, self.comments)

    def _value(self) -> object:
        """Parse one value. `stack` holds the open containers as (container, its key, the offset where it opens)."""
        stack: list[tuple[Json | list[object], Key, int]] = []
        key: Key = ()
        while True:
            self._skip(key)
            begin = self.at
            opener = self.text[begin : begin + 1]
            if opener in ("{", "["):
                if len(stack) >= MAX_DEPTH:
                    raise self._stop(f"nested deeper than {MAX_DEPTH} levels", self.at)
                stack.append(({} if opener == "{" else [], key, begin))
                self.at += 1
                value, done = None, False
            else:
                value, done = self._scalar(key), True
            # Store finished values in their containers until one of them expects another item.
            while True:
                if done:
                    self.spans[key] = Span(*self.names.pop(key, (begin, begin)), begin, self.at)
                if not stack:
                    return value
                container, base, opened = stack[-1]
                if done and isinstance(container, list):
                    container.append(value)
                elif done and isinstance(container, dict):
                    container[str(key[-1])] = value
                following = self._next_key(container, base, opened, first=not done)
                if following is not None:
                    key = following
                    break
                stack.pop()
                value, key, begin, done = container, base, opened, True

    def _next_key(self, container: Json | list[object], base: Key, opened: int, first: bool) -> Key | None:
        """Move to the next item of `container` and return its key, or None if the container is closed."""
        closer, end = "}" if isinstance(container, dict) else "]", self.at
        self._skip(base)
        if self._take(closer):
            return None
        if not first:
            comma = self.at
            taken = self._take(",")
            # hjson, which DeepSpeed reads, needs no comma before an item on another line.
            new_line = "\n" in self.text[end : self.at]
            if not taken and not (new_line and self.text[self.at : self.at + 1] not in ("", "}", "]", ":")):
                raise self._expected("a comma", closer, opened)
            self._skip(base)
            if not taken:
                self._note("missing-comma", base, end, None, "missing comma between this item and the next line")
            elif self._take(closer):
                self._note("trailing-comma", base, comma, None, f"trailing comma before {closer}")
                return None
        if isinstance(container, list):
            key = (*base, len(container))
            self.places[key] = self._place(self.at)
            return key
        return self._name(container, base, opened)

    def _name(self, container: Json, base: Key, opened: int) -> Key:
        start = self.at
        found = _STRING.match(self.text, self.at)
        if not found:
            if self.text[self.at : self.at + 1] == '"':
                raise self._bad_string()
            raise self._expected('a key in double quotes (")', "}", opened)
        key = (*base, json.loads(found.group()))
        self.at = found.end()
        if key[-1] in container:
            first = self.places[key][0]
            what = f"`{_short(key[-1])}` appears twice (first on line {first}): DeepSpeed rejects the file, "
            self._note("duplicate", key, start, container[key[-1]], what + "the Trainer uses the last value")
        self.places[key] = self._place(start)
        self.names[key] = (start, self.at)
        self._skip(key)
        if not self._take(":"):
            raise self._stop(f'expected a colon after the key "{_short(key[-1])}"', self.at)
        return key

    def _scalar(self, key: Key) -> object:
        text, start = self.text, self.at
        if found := _STRING.match(text, start):
            self.at = found.end()
            return json.loads(found.group())
        if found := _NUMBER.match(text, start):
            self.at = found.end()
            number = json.loads(found.group())
            if number in (float("inf"), float("-inf")):
                self._note("not-a-number", key, start, found.group(), "too large for a number")
            return number
        if found := _WORD.match(text, start):
            word = found.group()
            self.at = found.end()
            if word in _WORDS:
                return _WORDS[word]
            if word in _NOT_NUMBERS:
                self._note("not-a-number", key, start, word, f"{word} is not valid JSON; write a finite number")
                return float(_NOT_NUMBERS[word])
            if word in _FOREIGN_WORDS:
                right = json.dumps(_FOREIGN_WORDS[word])
                self._note("python-word", key, start, word, f"{word} is Python, not JSON; write {right}")
                return _FOREIGN_WORDS[word]
            raise self._stop(f"`{_short(word)}` is not a JSON value; put strings in double quotes", start)
        if start >= len(text):
            raise self._stop("the file ends where a value is expected", start)
        if text[start] == '"':
            raise self._bad_string()
        raise self._stop(f"expected a value, found {_show(text[start])}", start)

    def _skip(self, key: Key) -> None:
        """Skip white space and comments, and report the comments."""
        while True:
            if space := _SPACE.match(self.text, self.at):
                self.at = space.end()
            found = _COMMENT.match(self.text, self.at)
            if not found:
                return
            what = "comments are not valid JSON: DeepSpeed accepts them, the Trainer and accelerate do not"
            self._note("comment", key, self.at, _short(found.group()), what)
            self.comments[found.start()] = found.end()
            self.at = found.end()

    def _take(self, character: str) -> bool:
        if self.text[self.at : self.at + 1] == character:
            self.at += 1
            return True
        return False

    def _note(self, kind: str, key: Key, at: int, value: object, what: str) -> None:
        if len(self.problems) < 200:  # a file full of comments would give 100,000 messages
            self.problems.append(Problem(kind, key, *self._place(at), value, what, at))

    def _place(self, at: int) -> tuple[int, int]:
        line = bisect_right(self.line_starts, at)
        return line, at - self.line_starts[line - 1] + 1

    def _stop(self, what: str, at: int) -> Unreadable:
        return Unreadable(what, *self._place(at))

    def _expected(self, what: str, closer: str, opened: int) -> Unreadable:
        if self.at >= len(self.text):
            line, _ = self._place(opened)
            return self._stop(f"the file ends before the {closer} that closes line {line}", self.at)
        return self._stop(f"expected {what} or {closer}, found {_show(self.text[self.at])}", self.at)

    def _bad_string(self) -> Unreadable:
        end = self.text.find("\n", self.at)
        line = self.text[self.at : end if end >= 0 else len(self.text)]
        why = "has an invalid escape" if line.count('"') > 1 else "is not closed on its line"
        return self._stop(f"the string {_show(line[:20])} {why}", self.at)


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."


def _show(text: str) -> str:
    return json.dumps(text, ensure_ascii=True)
