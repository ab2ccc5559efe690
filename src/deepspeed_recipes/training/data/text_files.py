"""Reads examples from local text files, each with its place: JSON Lines, JSON arrays, CSV, plain text.

Standard library only, so that the launcher can check a file before it starts a process. The ranks use the same
functions instead of the loaders of `datasets`, which convert strings that look like dates or numbers.
"""

import codecs
import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...recipe.errors import UserError
from ...recipe.recipe import Data, names

COLUMNAR = {".parquet": "parquet", ".arrow": "arrow"}
"""Files that pyarrow reads; everything else is text."""
SEPARATORS = {".csv": ",", ".tsv": "\t"}
SUFFIXES = (".jsonl", ".ndjson", ".json", *SEPARATORS, *COLUMNAR)
"""Suffixes of the files in a folder that hold examples."""
PLAIN = (".txt", ".md", ".rst")
"""Suffixes of raw text; in a folder they are read if it has no other files."""
READ = (*SUFFIXES, *PLAIN)
BINARY = {
    b"\x1f\x8b": "compressed with gzip",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ": "compressed with xz",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "Parquet without the suffix .parquet",
    b"ARROW1": "Arrow without the suffix .arrow",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
"""First bytes of files that are not UTF-8."""
DOCUMENT = 2**20
"""Characters of a plain text file after which another document begins, at the end of a line."""


def weights(data: Data) -> list[float] | None:
    """Return the shares in which the sources are mixed, which add up to one, or None: every example of each once.

    Raises:
        UserError: not a number above zero for every source.
    """
    if data.weights is None:
        return None
    sources = names(data.path)
    try:
        values = [float(weight) for weight in data.weights.split(",")]
    except ValueError:
        values = []
    if len(values) != len(sources) or not all(0 < value < float("inf") for value in values):
        raise UserError(
            f"data.weights={data.weights}: data.path names {len(sources)} sources, so {len(sources)} numbers above 0 "
            "are expected, with commas (3,1)."
        )
    return [value / sum(values) for value in values]


def read(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, example) for every example of a text file.

    Raises:
        UserError: not UTF-8, not JSON, not an object, or not a table, with the line.
        OSError: names the file, which the system's errors of reading do not.
    """
    try:
        yield from _read(path)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _read(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if path.suffix in SEPARATORS:
        return _table(path, SEPARATORS[path.suffix])
    if path.suffix in PLAIN:
        return _plain(path)
    if path.suffix == ".json" and _is_array(path):
        return _array(path)
    return _json_lines(path)


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    with path.open("rb") as lines:
        start = lines.read(8)
        for begins, kind in BINARY.items():
            if start.startswith(begins):
                raise UserError(f"{path}: is {kind}, not text; unpack it, or save it as UTF-8 text.")
        lines.seek(0)
        for number, line in enumerate(lines, start=1):
            where = f"{path}:{number}"
            try:
                yield where, (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(f"{where}: not UTF-8 at byte {error.start}; save the file as UTF-8.") from None


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for where, line in _lines(path):
        if line.strip():
            try:
                row = from_json(line)
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"{where}: not JSON ({_reason(error)}); one JSON object per line is expected."
                ) from None
            yield where, _object(where, row)


def _array(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    text = "".join(line for _, line in _lines(path))
    try:
        rows = from_json(text)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise UserError(f"{path}:{line}: not JSON ({_reason(error)}); an array of objects is expected.") from None
    for number, row in enumerate(rows, start=1):
        yield f"{path}: row {number}", _object(f"{path}: row {number}", row)


def from_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: not JSON, a key twice in an object, of which one would be lost, a number with thousands of digits,
            or half of a character (a lone surrogate), which no tokenizer and no file supports.
        RecursionError: nested too deeply.
    """
    value = json.loads(text, object_pairs_hook=_object_of)
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"a lone surrogate, {ascii(error.object[error.start])[1:-1]}") from None
    return value


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} twice in an object")
    return found


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return getattr(error, "msg", None) or str(error).partition(";")[0]


def _is_array(path: Path) -> bool:
    with path.open("rb") as start:
        return start.read(1024).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _object(where: str, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise UserError(f"{where}: a {type(row).__name__}, not a JSON object.")
    return row


def _plain(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a file of raw text as one document, or as several if it is long, so that it need not fit in memory."""
    start, lines, length = "", [], 0
    for where, line in _lines(path):
        start = start or where
        lines.append(line)
        length += len(line)
        if length >= DOCUMENT:
            yield start, {"text": "".join(lines)}
            start, lines, length = "", [], 0
    if "".join(lines).strip():
        yield start, {"text": "".join(lines)}


def _table(path: Path, separator: str) -> Iterator[tuple[str, dict[str, Any]]]:
    csv.field_size_limit(sys.maxsize)  # the module's own limit, 128 KiB per cell, is too small for documents
    rows = csv.DictReader((line for _, line in _lines(path)), delimiter=separator, strict=True)
    try:
        names = list(rows.fieldnames or ())
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UserError(f"{path}:1: has the column {twice!r} twice, and one would be lost; rename it.")
        for row in rows:
            where = f"{path}:{rows.line_num}"
            if None in row or None in row.values():
                raise UserError(
                    f"{where}: not as many cells as the header has columns ({len(rows.fieldnames or [])}); quote cells "
                    "that hold the separator or a line break."
                )
            yield where, row
    except csv.Error as error:
        raise UserError(
            f'{path}:{rows.line_num + 1}: not a table ({error}); quote with " and double it inside.'
        ) from None
