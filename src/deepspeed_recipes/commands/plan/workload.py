"""The amount of training: tokens, as given or estimated from the data, and the deadline in hours."""

import argparse
import importlib.util
import math
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from ...planning.hardware.instances import prices
from ...planning.search.plans import Workload
from ...recipe.errors import UserError
from ...recipe.files import Json
from ...recipe.methods import Grpo, Kto
from ...recipe.recipe import Recipe, names
from ...training.data import text_files, updates
from ...training.data.forms import formats

CHARACTERS = 4
"""Characters of English text per token, approximately, with today's tokenizers; other languages have fewer."""
TEMPLATE = 4
"""Tokens that a chat template writes around a turn, with its role: Llama 3's and ChatML write 5, others 2 to 4."""
SCALES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
QUICK = 64 * 2**20
"""Largest size of the data, in bytes, that is read before a run; it takes about a second."""
FIRST = 2000
"""Examples of a large file from which its size is estimated."""
SAMPLED = 100
"""Examples that are tokenized to estimate a tokenizer's characters per token."""
HOURS = {"d": 24.0, "h": 1.0, "m": 1 / 60}


def workload(arguments: argparse.Namespace, recipe: Recipe, keys: Collection[str]) -> Workload | None:
    """Return the amount of training, or None if neither the command line nor a key that the user has set gives it."""
    known, (times, why) = prices(arguments.price), _passes(recipe)
    if arguments.examples or arguments.example_tokens:
        if not (arguments.examples and arguments.example_tokens):
            raise UserError("--examples and --example-tokens: give both, such as --examples 50k --example-tokens 500.")
        if arguments.tokens is not None:
            raise UserError(f"--tokens {arguments.tokens} and --examples: give one of them.")
        examples = tokens(arguments.examples, "--examples")
        length = tokens(arguments.example_tokens, "--example-tokens")
        if length > recipe.sequence_length and recipe.method.name != "pretrain":
            raise UserError(
                f"--example-tokens {arguments.example_tokens}: examples of more than sequence_length="
                f"{recipe.sequence_length} tokens are left out; give --sequence-length {math.ceil(length)}."
            )
        epochs = f"{recipe.epochs:g} epoch{'s' * (recipe.epochs != 1)}"
        about = f"{examples:,.0f} examples of {length:,.0f} tokens{why}, {epochs}"
        sequences = None if recipe.packs else examples * _answers(recipe)
        return Workload(examples * length * times * recipe.epochs, recipe.epochs, known, about, length, sequences)
    if arguments.tokens is not None:
        both = [key for key in ("epochs", "max_steps") if key in keys]
        if both:
            raise UserError(f"--tokens {arguments.tokens} and {both[0]}=...: give one of them.")
        return Workload(tokens(arguments.tokens), prices=known)
    if recipe.max_steps and "max_steps" in keys:
        sequences = recipe.max_steps * recipe.global_batch_size
        trained = sequences * recipe.sequence_length * recipe.method.sequences
        return Workload(trained, 1.0, known, f"{recipe.max_steps:,} steps", examples=sequences)
    if "data.path" in keys or "epochs" in keys:
        per_token = _characters_per_token(recipe)
        counted, attended = tokens_of(recipe, per_token)
        about = f"{per_token:.2g} characters per token{why}"
        size = None if recipe.packs else size_of(recipe)
        sequences = size.documents if size else None
        return Workload(recipe.epochs * counted * times, recipe.epochs, known, about, attended, sequences)
    return None


def _answers(recipe: Recipe) -> int:
    """Return the sequences of an epoch per example: GRPO writes several answers to each, and may reuse them."""
    method = recipe.method
    return method.group_size * method.iterations if isinstance(method, Grpo) else 1


def _passes(recipe: Recipe) -> tuple[int, str]:
    """Return how often the tokens of an example pass through the model in an epoch, and a remark on it."""
    if isinstance(recipe.method, Grpo):
        return (times := _answers(recipe)), f", {times} answers to each"
    if isinstance(recipe.method, Kto):
        return 2, ", each once more with another's answer, for the KL"
    return 1, ""


def tokens(text: str, flag: str = "--tokens") -> float:
    """Return the number of tokens from text such as `2e9`, `500M`, `1.5B` or `10_000_000`."""
    match = re.fullmatch(r"([0-9][0-9.,_]*(?:e[0-9]+)?)\s*([kmbgt]?)", text.strip().lower())
    try:
        number = float(match[1].replace(",", "").replace("_", "")) * SCALES[match[2]] if match else math.nan
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise UserError(f"{flag} {text}: must be a number above 0, such as 500M, 2B or 1e9.")
    return number


def deadline(text: str) -> float:
    """Return the hours of `8h`, `90m`, `2d` or `1d12h`."""
    parts = re.findall(r"([0-9.]+)\s*([dhm])", text.strip().lower())
    try:
        hours = sum(float(number) * HOURS[unit] for number, unit in parts)
    except ValueError:
        hours = 0.0
    if re.sub(r"[0-9.]+\s*[dhm]\s*", "", text.strip().lower()) or not 0 < hours < math.inf:
        raise UserError(f"--deadline {text}: must be a time above 0 with its unit, such as 8h, 90m or 2d.")
    return hours


def tokens_of(recipe: Recipe, per_token: float | None = None) -> tuple[float, float]:
    """Return the approximate tokens of an epoch, and the average length of the document to which a token belongs.

    Both are estimated from the characters of local files, with `per_token` characters per token or, if it is None, as
    many as a local tokenizer reads in the first examples.

    Raises:
        UserError: the data is not local text, or not in a format that the method reads.
    """
    per_token = per_token or _characters_per_token(recipe)
    lengths = _lengths(recipe, per_token)
    characters, examples = sum(times * length for length, times in lengths), sum(times for _, times in lengths)
    if not characters:
        raise UserError(f"data.path={' '.join(names(recipe.data.path))}: has no text to train on; give --tokens.")
    share = min(1.0, (recipe.data.max_examples or examples) / examples)
    whole = recipe.sequence_length * per_token  # longer documents are divided
    attended = sum(times * length * min(length, whole) for length, times in lengths) / characters
    return max(1.0, share * characters / per_token), max(1.0, attended / per_token)


def size_of(recipe: Recipe) -> updates.Size | None:
    """Return the approximate size of the training data, or None if it is not local or not readable.

    Files of columns and text of more than `QUICK` bytes are estimated from the first examples of each file.
    """
    try:
        files = list(_files(recipe))
        large, per_token = _text_bytes(files) > QUICK, _characters_per_token(recipe)
        lengths = _lengths(recipe, per_token, large)
    except UserError:
        return None
    if recipe.method.name != "pretrain":  # which cuts longer texts; other methods drop longer examples
        lengths = [one for one in lengths if one[0] <= recipe.sequence_length * per_token]
    total = sum(times for _, times in lengths)
    if not total:
        return None
    examples = min(round(total), recipe.data.max_examples or round(total))
    share, most = updates.FEW
    asked = recipe.data.validation_share
    left = 1 - (min(share, most / examples) if asked == "auto" else asked)
    documents = max(1, math.ceil(examples * left))
    counted = math.ceil(left * sum(length * times for length, times in lengths) / per_token * examples / total)
    documents *= _answers(recipe)
    sequences = -(-counted // recipe.sequence_length) if recipe.packs else documents
    estimated = large or any(map(text_files.is_columnar, files))
    return updates.Size(examples, documents, max(1, min(sequences, documents)), counted, estimated)


def _characters_per_token(recipe: Recipe) -> float:
    """Return the characters per token of the first examples with the model's tokenizer, or `CHARACTERS` if unknown."""
    file = Path(recipe.model.path, "tokenizer.json")
    if not file.is_file() or importlib.util.find_spec("tokenizers") is None:
        return CHARACTERS
    from tokenizers import Tokenizer  # does not import torch

    samples = (_read(file, recipe)[0] for file in _files(recipe))
    examples = islice((one for sample in samples for one in sample), SAMPLED)
    texts = [text for one in examples for text in _texts(one) if text]
    try:
        tokens = sum(len(one.ids) for one in Tokenizer.from_file(str(file)).encode_batch(texts))
    except Exception:  # a damaged file raises a bare Exception; the ranks report it
        return CHARACTERS
    return max(0.5, sum(map(len, texts)) / max(1, tokens))


def document_length(recipe: Recipe) -> float | None:
    """Return the average length of the document to which a token belongs, or None without packing or for large data."""
    try:
        small = recipe.packs and _text_bytes(_files(recipe)) <= QUICK
        return tokens_of(recipe)[1] if small else None
    except UserError:
        return None


def _read(file: Path, recipe: Recipe, large: bool = False) -> tuple[Iterable[Json], float]:
    """Return a file's examples, of `large` files and of columns the first, and how many times as many it has.

    Raises:
        UserError: a file that is not readable, or one large JSON array, which would have to be read whole.
    """
    if not (large or text_files.is_columnar(file)):
        return _examples(file, recipe), 1.0
    if text_files.is_columnar(file):
        rows = list(islice(text_files.read(file), FIRST))
        return list(_converted(iter(rows), recipe)), text_files.rows(file) / max(1, len(rows))
    if file.suffix == ".json":
        raise UserError(f"{file}: too large to estimate; save it as JSON Lines.")
    if file.suffix in text_files.PLAIN:  # documents of a megabyte
        found = list(islice(_examples(file, recipe), 1))
        return found, file.stat().st_size / max(1, sum(len(one["text"].encode()) for one in found))
    taken: list[str] = []

    def first() -> Iterator[tuple[str, Json]]:
        for place, row in islice(text_files.read(file), FIRST):
            taken.append(place)
            yield place, row

    found = list(_converted(first(), recipe))
    if len(taken) < FIRST:
        return found, 1.0
    with file.open("rb") as lines:  # places are PATH:LINE
        read = sum(map(len, islice(lines, int(taken[-1].rpartition(":")[2]))))
    return found, max(1.0, file.stat().st_size / max(1, read))


def _text_bytes(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files if not text_files.is_columnar(file))


def _files(recipe: Recipe) -> Iterator[Path]:
    """Yield the files that the run would read, without the ranks' knowledge of the names of splits."""
    if recipe.data.transform:  # it may import torch
        raise UserError(f"data.transform={recipe.data.transform}: plans do not run it; give --tokens.")
    for name in names(recipe.data.path):
        path, split = Path(name), recipe.data.split
        if not path.exists() and (name.startswith(("/", ".", "~")) or text_files.suffix(path) in text_files.READ):
            raise UserError(f"data.path={name}: no such file.")
        files, _ = text_files.files_of(path, split)
        if path.is_dir() and not files:
            words = ((file, text_files.SPLITS.search(str(file.relative_to(path)))) for file in path.rglob("*.*"))
            files = sorted(file for file, word in words if word and word[2].lower() in (split, f"{split}ing"))
        readable = [file for file in files if text_files.suffix(file) in text_files.READ]
        if not readable or (importlib.util.find_spec("pyarrow") is None and any(map(text_files.is_columnar, readable))):
            raise UserError(f"data.path={name}: only local files can be counted, Parquet with pyarrow; give --tokens.")
        yield from readable


def _examples(file: Path, recipe: Recipe) -> Iterator[Json]:
    return _converted(text_files.read(file, _bad(recipe)), recipe)


def _converted(rows: Iterator[tuple[str, Json]], recipe: Recipe) -> Iterator[Json]:
    located = formats.prepared(rows, formats.reading_of(recipe.data), bad := _bad(recipe))
    return formats.converted(located, recipe.method.name, recipe.data.form, bad)


def _bad(recipe: Recipe) -> text_files.BadExamples | None:
    return text_files.BadExamples() if recipe.data.bad == "skip" else None


def _lengths(recipe: Recipe, per_token: float, large: bool = False) -> list[tuple[float, float]]:
    """Return the characters of each example that is read, and how many examples of an epoch it stands for.

    They include those that a chat template would add to its turns. By `data.weights` the sources are drawn from until
    each has been read, as in `sources.mix`, and the others are repeated.
    """
    sources = []
    for name in names(recipe.data.path):
        found = []
        for file in _files(replace(recipe, data=replace(recipe.data, path=name))):
            examples, times = _read(file, recipe, large)
            for example in examples:
                parts = (TEMPLATE * per_token if text is None else len(text) for text in _texts(example))
                found.append((sum(parts), times))
        sources.append(found)
    if (shares := text_files.weights(recipe.data)) is None:
        return [one for source in sources for one in source]
    counts = [sum(times for _, times in source) for source in sources]
    drawn = max(count / share for count, share in zip(counts, shares, strict=True))
    return [
        (length, times * drawn * share / count)
        for source, count, share in zip(sources, counts, shares, strict=True)
        for length, times in source
    ]


def _texts(value: object) -> Iterator[str | None]:
    """Yield the texts of an example, and None for each turn; a preference pair's prompt is in it twice."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
    elif isinstance(value, dict):
        if "role" in value:
            yield None
        for key, part in value.items():
            for _ in range(0 if key == "role" else 2 if key == "prompt" and "chosen" in value else 1):
                yield from _texts(part)
