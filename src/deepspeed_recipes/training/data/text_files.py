"""Reads examples from local text files, each with its place: JSON Lines, JSON arrays, CSV, plain text.

Standard library only, so that the launcher can check a file before it starts a process. The ranks use the same
functions instead of the loaders of `datasets`, which convert strings that look like dates or numbers.
"""

import codecs
import csv
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ...recipe.errors import UserError, first_line
from ...recipe.files import Json, below, unique
from ...recipe.recipe import Data, names
from ...recipe.run_folder import read_json

if TYPE_CHECKING:
    from pyarrow import RecordBatch

COLUMNAR = {".parquet": "parquet", ".arrow": "arrow"}
"""Files that pyarrow reads; everything else is text."""
SEPARATORS = {".csv": ",", ".tsv": "\t"}
SUFFIXES = (".jsonl", ".ndjson", ".json", *SEPARATORS, *COLUMNAR)
"""Suffixes of the files in a folder that hold examples."""
PLAIN = (".txt", ".md", ".markdown", ".rst")
"""Suffixes of raw text; in a folder they are read if it has no other files."""
READ = (*SUFFIXES, *PLAIN)
READ_AT_ONCE = 100
"""Rows of a file of columns that are unpacked at a time; a row group can be a whole file."""
UNPACKED_BYTES, PACKED_TIMES = 2**28, 1000
"""Limit of a file's unpacked size: this many bytes, or this many times its size. Text packs to a third or a tenth."""
BINARY = {
    b"\x1f\x8b": "compressed with gzip",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ": "compressed with xz",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "Parquet without the suffix .parquet",
    b"ARROW1": "Arrow without the suffix .arrow",
    b"\xff\xff\xff\xff": "Arrow, as a stream, without the suffix .arrow",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
"""First bytes of files that are not UTF-8."""
SAVED = ("state.json", "dataset_dict.json")
"""Files of a folder that `save_to_disk` has written."""
SPLITS = re.compile(r"(?i)(^|[^a-z])(train|training|valid|validation|val|dev|test|testing|eval|evaluation)([^a-z]|$)")
"""Parts of names that show the Hub's splits."""
SHARDED = re.compile(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}.*\..*")
"""A file of a split, relative to its folder, as `push_to_hub` of `datasets` names it."""
DOCUMENT = 2**20
"""Characters of a plain text file after which another document begins, at the end of a line."""


def weights(data: Data) -> list[float] | None:
    """Return the shares in which the sources are mixed, which add up to one, or None: every example of each once."""
    if data.weights is None:
        return None
    sources = names(data.path)
    try:
        values = [float(weight) for weight in data.weights.split(",")]
    except ValueError:
        values = []
    if len(values) != len(sources) or not all(0 < value < float("inf") for value in values):
        raise UserError(
            f"data.weights={data.weights}: data.path names {len(sources)} sources; give as many "
            "numbers above 0, separated by commas (3,1)."
        )
    return [value / sum(values) for value in values]


def no_split(folder: Path, split: str, has: Iterable[str]) -> UserError:
    """Return the error that a folder lacks `data.split`."""
    known = sorted(has, key=lambda name: (not name.startswith(split), name))
    return UserError(f"data.split={split}: {folder} has the splits {', '.join(known)}; name one, as data.split=NAME.")


def missing_parts(files: Iterable[Path]) -> list[str]:
    """Return the names of the files that a folder lacks of those numbered `train-00000-of-00003.parquet`."""
    parts: dict[tuple[Path, str, str, str], set[int]] = {}
    for file in files:
        if found := PART.fullmatch(file.name):
            parts.setdefault((file.parent, found[1], found[3], found[4]), set()).add(int(found[2]))
    return [
        f"{start}-{number:05}-of-{count}{end}"
        for (_, start, count, end), numbers in parts.items()
        for number in range(int(count))
        if number not in numbers
    ]


def files_of(place: Path, split: str) -> tuple[list[Path], bool]:
    """Return the files of a source that can be read without `datasets`, and whether they are text and all of it.

    Only the ranks know the Hub's rules for the names of splits: where files have such names, there are none.
    """
    if place.is_file():
        return [place], not is_columnar(place)
    if not place.is_dir():
        return [], False
    files = [Path(file) for file in sorted(below(place))]
    # The Hub's rules leave out hidden files and folders, such as .ipynb_checkpoints.
    found = [file for file in files if not any(part.startswith((".", "__")) for part in file.relative_to(place).parts)]
    if not any(suffix(file) in READ for file in found):
        raise UserError(f"{place}: no data files in this folder or below ({', '.join(READ)}).")
    sharded: dict[str, list[Path]] = {}
    for file in found:
        if named := SHARDED.fullmatch(file.relative_to(place).as_posix()):
            sharded.setdefault(named[1], []).append(file)
    if (saved := place / SAVED[1]).exists():
        sharded |= {name: sorted((place / name).glob("data-*.arrow")) for name in read_json(saved)["splits"]}
    if sharded and split not in sharded:
        raise no_split(place, split, sharded)
    if (place / SAVED[0]).exists():
        return sorted(place.glob("data-*.arrow")), False
    if sharded:
        return sharded[split], False
    if any(SPLITS.search(str(file.relative_to(place))) for file in found):
        return [], False
    examples = [file for file in found if suffix(file) in SUFFIXES]
    examples = examples or [file for file in found if suffix(file) in PLAIN]
    return examples, not any(map(is_columnar, examples))


PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\..*)")
"""The name of one of several files of a data set, as the Hub numbers them."""
NUMBERED = re.compile(r"(.*?:(?: row )?)(\d+)(: .*)", re.DOTALL)
"""A message that begins with the place of an example."""


class BadExamples:
    """Collects the errors of a source's examples that cannot be used."""

    LISTED = 10

    def __init__(self, columns: Mapping[str, str] = MappingProxyType({})) -> None:
        """Start without errors; `columns` are the fields of `data.columns` by column, which advice keeps."""
        self.columns = columns
        self.first: list[str] = []
        self.count = 0

    def __call__(self, error: UserError) -> None:
        """Add an error."""
        self.count += 1
        if len(self.first) < self.LISTED:
            self.first.append(self.advised(error))

    def advised(self, error: UserError) -> str:
        """Return an error's message, in which `data.columns` is what the user has to write in full."""
        before, key, after = str(error).partition("data.columns=")
        for column, field in reversed([*self.columns.items()]) if key else ():
            if f",{field}:" in f",{after}":  # renamed already
                after = f",{after}".replace(f",{field}:", f",{column}:", 1)[1:]
            elif not re.search(rf":{field}\b", after):
                after = f"{column}:{field},{after}"
        return before + key + after

    def error(self, usable: int) -> UserError:
        """Return one error for all; `usable` is the number of the other examples."""
        if not usable:
            return UserError(self.first[0] + (f"\nNone of the {self.count} examples can be used." * (self.count > 1)))
        if self.count == 1:
            return UserError(f"{self.first[0]} data.bad=skip trains without this example.")
        listed = f", of which the first {self.LISTED} are listed" if self.count > self.LISTED else ""
        places: dict[tuple[str, str], list[str]] = {}
        for message in self.first:  # a reason is written once for all its lines of a file
            start, line, reason = found.groups() if (found := NUMBERED.fullmatch(message)) else (message, "", "")
            places.setdefault((start, reason), []).append(line)
        return UserError(
            "".join(
                f"{start.replace(': row ', ': rows ') if lines[1:] else start}{', '.join(lines)}{reason}\n"
                for (start, reason), lines in places.items()
            )
            + f"{self.count} of {self.count + usable} examples cannot be used{listed}; correct "
            "them, or train without them: data.bad=skip."
        )


Bad = Callable[[UserError], None]
"""Called with the error of an example, which is then left out."""


def refuse(error: UserError, bad: Bad | None) -> None:
    """Pass an example's error to `bad`, or raise it if there is none."""
    if bad is None:
        raise error
    bad(error)


def read(path: Path, bad: Bad | None = None) -> Iterator[tuple[str, Json]]:
    """Yield (place, example) for every example of a text file; an OSError names the file, unlike the system's own.

    `bad` is called with the errors of single lines and rows, which are otherwise raised.
    """
    kind = suffix(path)
    try:
        if kind in COLUMNAR:  # without the loader of `datasets`, which takes seconds to import
            from pyarrow.parquet import ParquetFile

            with damage_named(path, COLUMNAR[kind]):
                check_table(path, COLUMNAR[kind])
                parquet = COLUMNAR[kind] == "parquet"
                batches = ParquetFile(path).iter_batches(batch_size=READ_AT_ONCE) if parquet else _arrow(path)[1]
                rows = (row for batch in batches for row in batch.to_pylist())
                yield from ((f"{path}: row {number}", row) for number, row in enumerate(rows, start=1))
        elif kind in SEPARATORS:
            yield from _table(path, SEPARATORS[kind], bad)
        elif kind in PLAIN:
            yield from _plain(path, bad)
        else:
            yield from _json(path, bad)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def suffix(path: Path) -> str:
    """Return a file's suffix in small letters; some programs write .CSV or .JSONL."""
    return path.suffix.lower()


def is_columnar(path: Path) -> bool:
    """Return whether a file is one that pyarrow reads."""
    return suffix(path) in COLUMNAR


def rows(path: Path) -> int:
    """Return the number of rows of a file of columns."""
    from pyarrow.parquet import ParquetFile

    kind = COLUMNAR[suffix(path)]
    with damage_named(path, kind):
        if kind == "parquet":
            return int(ParquetFile(path).metadata.num_rows)
        return sum(batch.num_rows for batch in _arrow(path)[1])


@contextmanager
def damage_named(path: Path, kind: str) -> Iterator[None]:
    """Raise a UserError with the file and its kind for what pyarrow and `datasets` raise."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # pyarrow and datasets raise a dozen types for damaged or unsupported files
        unknown = "dtype equivalent" in str(error)  # a map or a union, which `datasets` has no type for
        fix = "leave the column out, or save it as text." if unknown else "is the copy complete? Write it again."
        raise UserError(f"{path}: cannot be read as {kind} ({first_line(error)}); {fix}") from error


def check_columns(where: str, names: list[str]) -> None:
    """Refuse a table with two columns of one name."""
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{where}: has the column {twice!r} twice, and one would be lost; rename it.")


def _arrow(path: Path) -> tuple[list[str], "Iterable[RecordBatch]"]:
    """Return the names of the columns and the rows of a file in one of Arrow's two formats."""
    from pyarrow import ArrowInvalid, ipc

    try:
        stream = ipc.open_stream(path)
    except ArrowInvalid:
        file = ipc.open_file(path)
        return file.schema.names, map(file.get_batch, range(file.num_record_batches))
    return stream.schema.names, stream


def check_table(path: Path, kind: str) -> None:
    """Refuse two columns of one name, and a row group that would take far more memory than the file's size suggests."""
    from pyarrow.parquet import ParquetFile

    if kind != "parquet":
        check_columns(str(path), _arrow(path)[0])
        return
    about = ParquetFile(path).metadata
    check_columns(str(path), about.schema.to_arrow_schema().names)
    for number in range(about.num_row_groups):
        columns = [about.row_group(number).column(index) for index in range(about.num_columns)]
        unpacked = sum(column.total_uncompressed_size for column in columns)
        if unpacked > UNPACKED_BYTES and unpacked > PACKED_TIMES * path.stat().st_size:
            raise unpacks(path)


def unpacks(path: Path) -> UserError:
    """Return the error for a file whose examples are far larger than it."""
    size = path.stat().st_size
    return UserError(
        f"{path}: unpacks to over {PACKED_TIMES} times its {size:,} bytes; if it is training data, save it as JSON "
        "Lines."
    )


def _lines(path: Path, bad: Bad | None = None) -> Iterator[tuple[str, str]]:
    with path.open("rb") as lines:
        start = lines.read(8)
        for begins, kind in BINARY.items():
            if start.startswith(begins):
                raise UserError(f"{path}: is {kind}, not text; unpack it, or save it as UTF-8 text.")
        lines.seek(0)
        for number, line in enumerate(lines, start=1):
            where = f"{path}:{number}"
            if b"\0" in line:
                nul = "has a NUL byte, which no text has; is it UTF-16, or a damaged copy? Save the file as UTF-8."
                refuse(UserError(f"{where}: {nul}"), bad)
                continue
            try:
                text = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).decode("utf-8")
            except UnicodeDecodeError as error:
                refuse(UserError(f"{where}: not UTF-8 at byte {error.start}; save the file as UTF-8."), bad)
                continue
            yield where, text


def _json(path: Path, bad: Bad | None) -> Iterator[tuple[str, Json]]:
    """Yield the objects of a file with one per line, or of a `.json` file with an array of them."""
    array = False
    located: Iterator[tuple[str, Any]] = ((where, line) for where, line in _lines(path, bad) if line.strip())
    if suffix(path) == ".json":
        with path.open("rb") as start:
            array = start.read(1024).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    if array:
        try:
            rows = from_json("".join(line for _, line in _lines(path)))
        except (ValueError, RecursionError) as error:
            line = getattr(error, "lineno", 1)
            raise UserError(f"{path}:{line}: not JSON ({reason_of(error)}); an array of objects is expected.") from None
        located = ((f"{path}: row {number}", row) for number, row in enumerate(rows, start=1))
    for where, found in located:
        try:
            row = found if array else from_json(found)
            if not isinstance(row, dict):
                fix = "; an array of objects is read from a .json file" if isinstance(row, list) else ""
                raise UserError(f"{where}: a {type(row).__name__}, not a JSON object{fix}.")
        except (ValueError, RecursionError) as error:
            others = "" if suffix(path) in SUFFIXES else f" (raw text has the suffix {', '.join(PLAIN)})"
            expected = f"one JSON object per line is expected{others}."
            refuse(UserError(f"{where}: not JSON ({reason_of(error)}); {expected}"), bad)
        except UserError as error:
            refuse(error, bad)
        else:
            yield where, row


def from_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: not JSON, a key twice in an object, of which one would be lost, a number with thousands of digits,
            or half of a character (a lone surrogate), which no tokenizer and no file supports.
        RecursionError: nested too deeply.
    """
    value = json.loads(text, object_pairs_hook=unique)
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"a lone surrogate, {ascii(error.object[error.start])[1:-1]}") from None
    return value


def reason_of(error: ValueError | RecursionError) -> str:
    """Return why a text is not JSON, from the error of `from_json`."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return getattr(error, "msg", None) or str(error).partition(";")[0]


def _plain(path: Path, bad: Bad | None) -> Iterator[tuple[str, Json]]:
    """Yield a file of raw text as one document, or as several if it is long, so that it need not fit in memory."""
    start, lines, length = "", [], 0
    for where, line in _lines(path, bad):
        start = start or where
        lines.append(line)
        length += len(line)
        if length >= DOCUMENT:
            yield start, {"text": "".join(lines)}
            start, lines, length = "", [], 0
    if "".join(lines).strip():
        yield start, {"text": "".join(lines)}


def _table(path: Path, separator: str, bad: Bad | None) -> Iterator[tuple[str, Json]]:
    """Yield a table's rows, each with the line in which it starts: cells may hold line breaks."""
    csv.field_size_limit(sys.maxsize)  # the module's own limit, 128 KiB per cell, is too small for documents
    places, widths = list[str](), list[int]()

    def lines() -> Iterator[str]:
        for where, line in _lines(path, bad):
            places.append(where)
            widths.append(line.count("\t") + 1)
            yield line

    source = lines()
    head = next(source, "")
    if named := re.fullmatch(r"sep=(.)\s*", head):  # a spreadsheet's own line before the header
        separator, head = named[1], next(source, "")
        places.pop(0)
    elif separator == "," and "," not in head:  # as spreadsheets write where the comma is decimal, and databases
        separator = next((other for other in ";\t|" if other in head), ",")
    rows, names = csv.reader(chain([head], source), delimiter=separator, strict=True), list[str]()
    while True:
        if names:
            places.clear()
            widths.clear()
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            wrong = UserError(f'{places[0]}: not a table ({error}); quote with " and double it inside.')
            if not names or "end of data" in str(error):  # a quote that is never closed holds the rest of the file
                raise wrong from None
            refuse(wrong, bad)
            continue
        if not row:
            continue
        if not names:
            names = [name.strip() for name in row]
            check_columns(places[0], names)
        elif separator == "\t" and len(widths) > 1 and set(widths) == {len(names)}:
            joined = f"a quote joins {len(widths)} lines, each of which is a row"
            refuse(UserError(f"{places[0]}: {joined}; remove it, or write it twice in quotes."), bad)
        elif len(row) == len(names):
            yield places[0], dict(zip(names, row, strict=True))
        else:
            number = UserError(
                f"{places[0]}: not as many cells as the header has columns ({len(names)}); quote cells that hold the "
                "separator or a line break."
            )
            refuse(number, bad)
