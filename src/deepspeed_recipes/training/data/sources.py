"""Reads a run's sources, converts them to the method's form, mixes them by weight, and splits them."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow.compute as pc
from datasets import (
    Audio,
    ClassLabel,
    Dataset,
    DatasetDict,
    Features,
    Image,
    IterableDataset,
    Json,
    List,
    Value,
    Video,
    concatenate_datasets,
    interleave_datasets,
    load_dataset,
    load_from_disk,
)
from datasets.data_files import DataFilesDict, EmptyDatasetError, get_data_patterns
from datasets.exceptions import DatasetGenerationError

from ...recipe import own_code
from ...recipe.errors import UserError, counted, first_line
from ...recipe.methods import METHODS
from ...recipe.recipe import Data, Recipe, names
from ...recipe.run_folder import read_json
from .. import upstream
from ..model_folder import weights
from . import images, text_files
from .forms import formats, keys, turns
from .updates import FEW

Examples: TypeAlias = Dataset | IterableDataset
Located = Iterator[tuple[str, turns.Example]]

GIVEN = {"tools": Json(), "options": Json()}
"""Arguments of the chat template in addition to the turns."""
FEATURES = {
    # Turns as JSON: Arrow's structs would give every turn and every tool call the keys of all the others.
    "conversations": Features({"messages": Json(), **GIVEN, "given": Value("int32")}),
    "pairs": Features({"prompt": Json(), "chosen": Json(), "rejected": Json(), **GIVEN}),
    "judged answers": Features({"prompt": Json(), "completion": Json(), "label": Value("bool"), **GIVEN}),
    "texts": Features({"text": Value("string")}),
    # Not text as JSON: a text that is itself JSON, such as a number, would be read as its value.
    "labelled texts": Features({"text": Value("string"), "messages": Json(), **GIVEN, "label": Value("string")}),
    "matching texts": Features(
        {"anchor": Value("string"), "positive": Value("string"), "negative": List(Value("string"))}
    ),
    "prompts": Features(
        {"messages": Json(), "tools": Json(), "given": Value("int32"), "text": Value("string"), "fields": Json()}
    ),
}
"""The columns of each kind of examples; `formats.py` describes them."""
PICTURES = {"images": List({"path": Value("string"), "bytes": Value("binary")}), "where": Value("string")}
"""More columns of conversations with images; `data/images.py` describes them."""
UNREAD = "unread"
"""A column with the keys of an example that nothing reads; they are counted, and the column is removed."""
OTHER_FORM = "\0form "
"""Begins an entry in that column with the form of the example, where it is not that of the source's first one."""
BAD = "bad"
"""A column with the error of an example that is left out."""
DROPPED = "\0dropped "
"""Begins a row's entry in that column with the number of examples that `data.transform` has dropped."""


def digest_of_code(files: Iterable[Path], *versions: str) -> str:
    """Return a digest of source files and versions, to tell what another version has left in the cache."""
    code = b"".join(file.read_bytes() for file in files)
    return hashlib.blake2b(code + " ".join(versions).encode(), digest_size=8).hexdigest()


CONVERTED_BY = digest_of_code(
    Path(str(file)) for file in (__file__, *(one.__file__ for one in (text_files, formats, keys, turns, images)))
)
"""Identifies this version of the conversions; examples in the cache of another version are converted again."""

NOTES = re.compile(r"(?i)(readme|licen[cs]e|notice)\b")
"""Files of a folder that are not data, and cause no warning."""
NAMED_FILES = 5
"""Maximum number of files in a message."""
EMPTY_BYTES = 2**16
"""No file without examples is larger: it holds only a header or a schema."""


@dataclass(frozen=True)
class Source:
    """One of the datasets in `data.path`, converted to the method's columns."""

    name: str
    forms: Sequence[str]
    """The forms of its files, keys of `formats.FORMS`: the first example's, then others."""
    examples: Examples
    """Converted to the columns of `FEATURES`."""
    unread: Mapping[str, int]
    """Number of examples by key that nothing here reads, with the names from `formats.unread`; for a stream, of the
    first example only."""
    skipped: Sequence[str] = ()
    """The errors of the examples that `data.bad=skip` leaves out."""
    dropped: int = 0
    """Number of examples that `data.transform` has dropped; unknown for a stream."""

    def line(self) -> str:
        """Return a line for the screen that describes the source."""
        count = counted(len(self.examples), "example") if isinstance(self.examples, Dataset) else "streamed"
        dropped = f"; {self.dropped} dropped by data.transform" if self.dropped else ""
        return f"{self.short}: {count} in the form {' or '.join(self.forms)}{dropped}"

    def unread_line(self, template: str) -> str | None:
        """Return a line with the keys that neither this project nor the chat template reads, or None."""
        return formats.unread_line(self.short, self.unread, template)

    @property
    def short(self) -> str:
        """The last two parts of its name, for display."""
        return "/".join(Path(self.name).parts[-2:])


def read(path: str, recipe: Recipe, streaming: bool = False) -> list[Source]:
    """Return the sources in `path`, checked and converted for the recipe's method.

    Streamed examples are checked when they are reached.
    """
    upstream.keep_json_numbers()
    data = recipe.data
    every = names(data.path) + names(data.validation)
    rows = (_located(name, data.split, True, lambda _: None) for name in every)
    formats.refuse_unknown_columns(formats.reading_of(data), rows)
    return [_source(name, recipe, streaming) for name in names(path)]


def _source(name: str, recipe: Recipe, streaming: bool) -> Source:
    reading = formats.reading_of(recipe.data)
    bad = text_files.BadExamples(formats.column_fields(recipe.data.columns))
    located = formats.prepared(_located(name, recipe.data.split, True, None if streaming else bad), reading, bad)
    try:
        first = formats.first_form(located, recipe.method.name, recipe.data.form)
    except UserError as error:
        raise UserError(bad.advised(error)) from None
    if first is None:
        keeps = f" that data.transform={recipe.data.transform} keeps" if recipe.data.transform else ""
        raise bad.error(0) if bad.count else UserError(f"{name}: contains no examples{keeps}.")
    where, example, form = first
    found: turns.Example = {
        "name": name,
        "split": recipe.data.split,
        "method": recipe.method.name,
        "form": form,
        "asked": recipe.data.form,
        "reading": reading,
        "skip": recipe.data.bad == "skip",
    }
    kept = Features({UNREAD: List(Value("string")), BAD: Value("string")})
    features = Features({**FEATURES[recipe.method.examples], **kept})
    if recipe.model.vision:
        features, found["vision"] = Features({**features, **PICTURES}), True
    if streaming:
        stream = IterableDataset.from_generator(_converted, features, gen_kwargs=found)
        stream = stream.remove_columns([UNREAD, BAD])
        unread = dict.fromkeys(formats.unread(where, example, form, recipe.method.name), 1)
        return Source(name, [form], stream, unread)
    # datasets caches a generator's output by its arguments, so an argument identifies the version of the data.
    version: list[object]
    if (path := Path(name)).exists():
        within = [file for file in (sorted(path.rglob("*")) if path.is_dir() else [path]) if file.is_file()]
        version = [(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in within]
    else:  # the cache's files are named by their commit
        version = [file["filename"] for file in _from_hub(name, recipe.data.split, streaming=False).cache_files]
    found["version"] = (CONVERTED_BY, own_code.digests(recipe).get("data.transform"), *version)
    try:
        examples = Dataset.from_generator(_converted, features, gen_kwargs=found)
    except DatasetGenerationError as error:
        raise (error.__cause__ if isinstance(error.__cause__, UserError) else error) from None
    skipped: list[str] = []
    dropped = 0
    if found["skip"] or reading["transform"]:
        errors = examples.select_columns(BAD).with_format("arrow")[:][BAD]
        noted = pc.drop_null(errors).to_pylist()
        skipped = [one for one in noted if not one.startswith(DROPPED)]
        dropped = sum(int(one.removeprefix(DROPPED)) for one in noted if one.startswith(DROPPED))
        examples = examples.select(np.flatnonzero(pc.is_null(errors).to_numpy(zero_copy_only=False)))
    examples = examples.remove_columns(BAD)
    counts: Counter[str] = Counter()
    for batch in examples.select_columns(UNREAD).with_format("arrow").iter(1000):
        counts.update(pc.list_flatten(batch[UNREAD]).to_pylist())
    forms = [form, *(key.removeprefix(OTHER_FORM) for key in counts if key.startswith(OTHER_FORM))]
    counts = Counter({key: count for key, count in counts.items() if not key.startswith(OTHER_FORM)})
    return Source(name, forms, examples.remove_columns(UNREAD), counts, skipped, dropped)


def _converted(
    name: str,
    split: str,
    method: str,
    form: str,
    asked: str,
    reading: turns.Example,
    skip: bool,
    version: object = None,
    vision: bool = False,
) -> Iterator[turns.Example]:
    """Yield the examples, then rows without one: the errors of examples that are skipped, and the number dropped."""
    errors = text_files.BadExamples({**reading["columns"], **reading["keys"]})
    messages, latest = list[str](), list[str]()

    def note(error: UserError) -> None:
        errors(error)
        messages.append(str(error))

    dropped = list[None]()
    bad = None if version is None else note  # a stream is not read to its end before training

    def located() -> Located:
        own: str | None = None
        file = ""
        for where, example in formats.prepared(
            _located(name, split, version is None, bad), reading, bad, lambda: dropped.append(None)
        ):
            if formats.file_of(where) != file:
                own, file = None, formats.file_of(where)
            own = own or formats.form_or_none(where, example, method, asked)
            try:
                keys = formats.unread(where, example, own or form, method)
            except UserError as error:
                text_files.refuse(error, bad)
                continue
            latest[:] = [key for key in keys if not (vision and key in images.FIELDS)]
            latest.extend([f"{OTHER_FORM}{own}"] * (own not in (None, form)))
            yield where, example

    if vision:
        found = images.converted(located(), method, asked, folder_of(Path(name)), bad, form)
        found = images.checked(found, bad) if skip else found
    else:
        found = formats.converted(located(), method, asked, bad, form)
    columns = {**FEATURES[METHODS[method].examples], **(PICTURES if vision else {})}
    usable = 0
    for usable, example in enumerate(found, start=1):  # noqa: B007
        yield {**dict.fromkeys(columns), **example, UNREAD: list(latest), BAD: None}
    if errors.count and not (skip and usable):
        raise errors.error(usable)
    if version is not None and dropped:
        messages.append(f"{DROPPED}{len(dropped)}")
    for message in messages:
        yield {**dict.fromkeys(columns), UNREAD: [], BAD: message}


def folder_of(source: Path) -> Path | None:
    """Return the folder to which the paths of a source's images are relative, or None if it is on the Hub."""
    return (source if source.is_dir() else source.parent) if source.exists() else None


def _located(name: str, split: str, streaming: bool, bad: text_files.Bad | None = None) -> Located:
    """Yield (place, example) for every example of a source; `bad` gets the errors of lines, or they are raised."""
    path = Path(name)
    if not path.exists():
        yield from _numbered(name, _from_hub(name, split, streaming))
    elif path.is_file():
        yield from _from_file(path, bad)
    elif any((path / state).exists() for state in text_files.SAVED):
        with text_files.damage_named(path, "what save_to_disk writes"):
            saved = load_from_disk(path)
            if isinstance(saved, DatasetDict):
                if split not in saved:
                    raise text_files.no_split(path, split, saved)
                saved = saved[split]
            yield from _numbered(path, saved)
    else:
        for file in _files(path, split):
            yield from _from_file(file, bad)


def _numbered(name: object, found: Examples) -> Located:
    """Yield (place, row) of a table, in JSON's types and bytes; a `ClassLabel` is its name, or None if it is -1.

    Media are undecoded files; `datasets` would decode them, with torchcodec.
    """
    features = dict(found.features or {})
    for column, kind in features.items():
        if (as_file := _undecoded(kind)) != kind:
            found = found.cast_column(column, as_file)
    classes = {column: kind.names for column, kind in features.items() if isinstance(kind, ClassLabel)}
    for number, row in enumerate(found, start=1):
        labels = {column: row[column] for column in classes}
        named = {name: None if at is None or at < 0 else classes[name][at] for name, at in labels.items()}
        yield f"{name}: row {number}", _as_json({**row, **named})


def _as_json(value: Any) -> Any:
    """Return a value with its dates, times and decimals as text."""
    if isinstance(value, dict):
        return {key: _as_json(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_as_json(one) for one in value]
    return str(value) if isinstance(value, date | time | timedelta | Decimal) else value


def _from_file(path: Path, bad: text_files.Bad | None = None) -> Located:
    kind = text_files.COLUMNAR.get(text_files.suffix(path))
    if kind is None:
        yield from text_files.read(path, bad)
        return
    options = {"batch_size": text_files.READ_AT_ONCE} if kind == "parquet" else {}
    with text_files.damage_named(path, kind):
        text_files.check_table(path, kind)
        examples = load_dataset(kind, data_files=str(path), split="train", streaming=True, **options)
        total, most = 0, max(text_files.UNPACKED_BYTES, text_files.PACKED_TIMES * path.stat().st_size)
        for where, example in _numbered(path, examples):
            # The columns' sizes are not enough: a dictionary stores equal texts once.
            total += formats.characters(example, other=1)
            if total > most:
                raise text_files.unpacks(path)
            yield where, example


def _undecoded(kind: object) -> Any:
    """Return a column's type with media as a file's path and bytes."""
    if isinstance(kind, Audio | Image | Video):
        return type(kind)(decode=False)
    if isinstance(kind, List):
        return List(_undecoded(kind.feature), length=kind.length)
    return {name: _undecoded(one) for name, one in kind.items()} if isinstance(kind, dict) else kind


def _splits(folder: Path) -> Mapping[str, Sequence[str]]:
    """Return the files of a folder by the split that their names indicate."""
    try:
        found = DataFilesDict.from_patterns(get_data_patterns(str(folder)), base_path=str(folder))
    except EmptyDatasetError:
        return {}
    return {str(split): files for split, files in found.items()}


def _files(folder: Path, split: str) -> list[Path]:
    """Return a folder's files for a split: all, unless their names indicate splits as on the Hub."""
    found = _splits(folder)
    files = [Path(file) for file in found.get(split, ())]
    # A text file next to others is a licence or a note.
    chosen = [file for file in files if text_files.suffix(file) in text_files.SUFFIXES] or [
        file for file in files if text_files.suffix(file) in text_files.PLAIN
    ]
    if not chosen:
        kinds = ", ".join(text_files.READ)
        others = ""
        if split not in found and any(name.startswith(split) for name in found):  # train_sft
            raise text_files.no_split(folder, split, found)
        if found and split not in found:
            kind, named = next(iter(found.items()))
            taken = {Path(file).name for files in found.values() for file in files}
            free = (file for file in sorted(folder.iterdir()) if file.is_file() and file.name not in taken)
            left = next((file.name for file in free if text_files.suffix(file) in text_files.READ), None)
            others = (
                f"; {Path(named[0]).name} is named for the split {kind}, and then files without a split's name are not "
                f"read; give data.path={folder / left}"
                if left
                else f"; its files are of the split{'s' * (len(found) > 1)} {', '.join(found)}; data.split takes one"
            )
        raise UserError(f"{folder}: no file of the split {split!r} in this folder ({kinds}){others}.")
    return chosen


def unread_files(source: Source, data: Data, images: bool = False) -> list[str]:
    """Return warnings of the splits of a source and the files of a folder that are not read, or hold no example.

    Examples with `images` come with other files.
    """
    folder, split, read = Path(source.name), data.split, {Path(name) for name in names(data.validation)}
    splits: Iterable[str] = ()
    if (saved := folder / text_files.SAVED[1]).is_file():
        splits = read_json(saved)["splits"]
    elif source.name.count("/") == 1 and not folder.exists():  # on the Hub
        splits = _from_hub(source.name, split, not isinstance(source.examples, Dataset)).info.splits or ()
    warnings = []
    if unread := [one for one in splits if one != split and folder / one not in read]:
        measured = _measured(folder / min(unread, key=lambda name: name.startswith("train")))
        warnings.append(f"warning: {folder}: not read: {', '.join(unread)} among its splits{measured}")
    if not folder.is_dir():
        return warnings
    if any((folder / state).exists() for state in text_files.SAVED):
        found = (one for place in (folder, folder / split) for one in sorted(place.glob("*")) if one not in read)
        # Written there by `datasets`: its states, data-00000-of-00001.arrow, and cache-*.arrow.
        theirs = {*text_files.SAVED, "dataset_info.json"}
        beside = [one for one in found if one.suffix != ".arrow" and one.name not in theirs and one.is_file()]
        if beside := [one for one in beside if text_files.suffix(one) in text_files.SUFFIXES]:
            named = ", ".join(str(file.relative_to(folder)) for file in beside[:NAMED_FILES])
            named += weights.more(beside, NAMED_FILES)
            warnings.append(f"warning: {folder}: a data set of save_to_disk; other files in it are not read: {named}")
        return warnings
    chosen = _files(folder, split)
    if missing := text_files.missing_parts(chosen):
        named = f"{', '.join(missing[:NAMED_FILES])}{weights.more(missing, NAMED_FILES)}"
        warnings.append(f"warning: {source.name}: {len(missing)} of its numbered files are missing: {named}.")
    below = sorted(one for one in folder.rglob("*") if not one.name.startswith("."))
    files = [one for one in below if one.is_file()]
    if links := [str(one.relative_to(folder)) for one in below if one.is_symlink() and not one.is_file()]:
        named = f"{', '.join(links[:NAMED_FILES])}{weights.more(links, NAMED_FILES)}"
        warnings.append(f"warning: {source.name}: links to folders or to nothing are not read: {named}.")
    others = set(files) - {file.resolve() for file in chosen} - set(chosen) - read
    left = [file for file in files if file in others and ("text" in source.forms or not NOTES.match(file.name))]
    if left and not images:
        named = ", ".join(str(file.relative_to(folder)) for file in left[:NAMED_FILES])
        named += weights.more(left, NAMED_FILES)
        measuring = [found for kind, found in _splits(folder).items() if not kind.startswith((split, "train"))]
        of_splits = {Path(file) for found in measuring for file in found}
        warnings.append(
            f"warning: {source.name}: {len(left)} of {len(files)} files are not read: {named}. Examples are read from "
            f"{', '.join(text_files.SUFFIXES)} of the split {split!r}, and raw text from {', '.join(text_files.PLAIN)} "
            "where there is none of these; name single files with commas in data.path"
            f"{next((_measured(file) for file in left if file in of_splits), '')}."
        )
    empty = [file.name for file in chosen if file.stat().st_size < EMPTY_BYTES and next(_from_file(file), None) is None]
    if empty:
        warnings.append(
            f"warning: {source.name}: {len(empty)} of {len(chosen)} files hold no example: "
            f"{', '.join(empty[:NAMED_FILES])}{weights.more(empty, NAMED_FILES)}; are the copies complete?"
        )
    return warnings


def _measured(place: Path) -> str:
    return f"; data.validation={place} measures the model on it"


def _from_hub(name: str, split: str, streaming: bool) -> Examples:
    """Return a split of a dataset on the Hub; `data.validation` may name a split itself, as OWNER/NAME/SPLIT."""
    if name.count("/") == 2:
        name, _, split = name.rpartition("/")
    try:
        return load_dataset(name, split=split, streaming=streaming)
    except (OSError, ValueError) as error:
        reason = first_line(error)
        if "gated" in reason:
            fix = f"Ask for access on huggingface.co/datasets/{name}, then set HF_TOKEN, or run `hf auth login`."
        elif isinstance(error, ConnectionError):
            fix = "Without a network: copy the dataset here, and give its folder or files as data.path."
        else:
            fix = "Check the name and data.split, or give a local file or folder as data.path."
        raise UserError(f"data.path={name}: cannot load: {reason}\n{fix}") from error


def mix(sources: Sequence[Source], shares: Sequence[float] | None, seed: int) -> Examples:
    """Return one dataset: every example of each source once, or drawn by `shares` until every source has been read.

    Shorter sources are repeated, so that the shares hold from the first example to the last.
    """
    found = [source.examples for source in sources]
    if shares is None or len(found) == 1:
        return concatenate_datasets(found)
    return interleave_datasets(found, list(shares), seed, stopping_strategy="all_exhausted")


def draw(found: Dataset, most: int, seed: int) -> Dataset:
    """Return `most` examples drawn with the seed; a larger number begins with the examples of a smaller number."""
    return found.shuffle(seed=seed).select(range(most))


def split(sources: Sequence[Source], share: float | Literal["auto"], seed: int) -> tuple[list[Source], list[Source]]:
    """Return (training, held out): a seeded `share` of all examples is held out, equal examples on the same side.

    Examples are ranked by a seeded hash of their content, so an example nearly always keeps its side when others are
    added or reordered. Of each source some have to be left for training. With "auto" at most `FEW` are held out, and
    none where that is less than one example, or where a source would have none left.
    """
    ranks = [_ranks(source.examples, seed) for source in sources]
    every = np.sort(np.concatenate(ranks))
    if share == "auto":
        below = every[min(FEW[1], int(FEW[0] * len(every)))]
    else:
        below = every[max(1, round(share * len(every))) - 1] + 1
    training = [_keep(source, rank >= below) for source, rank in zip(sources, ranks, strict=True)]
    held_out = [_keep(source, rank < below) for source, rank in zip(sources, ranks, strict=True)]
    for source, left in zip(sources, training, strict=True):
        if not len(left.examples):
            if share == "auto":
                return list(sources), []
            raise UserError(
                f"data.validation_share={share}: leaves no example of {source.name} ({len(source.examples)}) to "
                "train on; lower it, or name a file in data.validation."
            )
    return training, [source for source in held_out if len(source.examples)]


def repeated(training: Sequence[Source], held_out: Sequence[Source], seed: int) -> list[str]:
    """Return lines that count equal examples: those trained on more than once, and held-out ones trained on at all."""
    if not all(isinstance(source.examples, Dataset) for source in training):
        return []
    trained = np.concatenate([_ranks(source.examples, seed) for source in training])
    lines = []
    if copies := len(trained) - len(np.unique(trained)):
        are = "is a copy of another" if copies == 1 else "are copies of others"
        lines.append(f"training: {copies} of {len(trained)} examples {are} ({copies / len(trained):.0%})")
    if held_out:
        measured = np.concatenate([_ranks(source.examples, seed) for source in held_out])
        if known := int(np.isin(measured, trained).sum()):
            lines.append(
                f"warning: held out: {known} of {len(measured)} examples are in the training data too, so their score "
                "does not show what the model does with new ones; remove them from data.validation"
            )
    return lines


def shared(training: Dataset, others: Dataset) -> int:
    """Return how many of the others are also in the training data."""
    return int(np.isin(_ranks(others, 0), _ranks(training, 0)).sum())


def count(sources: Sequence[Source]) -> int:
    """Return the examples of all sources."""
    return sum(len(source.examples) for source in sources)


def _ranks(found: Dataset, seed: int) -> np.ndarray:
    ranked = found.map(
        _rank, fn_kwargs={"seed": seed}, remove_columns=found.column_names, features=Features({"rank": Value("int64")})
    )
    return np.asarray(ranked.with_format("numpy")["rank"][:])  # without the format, each is converted by itself


def _rank(row: turns.Example, seed: int) -> dict[str, int]:
    content = json.dumps([seed, dict(row)], sort_keys=True, default=bytes.hex).encode()  # an image is bytes
    return {"rank": int.from_bytes(hashlib.blake2b(content, digest_size=7).digest())}


def _keep(source: Source, which: np.ndarray) -> Source:
    return replace(source, examples=source.examples.select(np.flatnonzero(which)))
