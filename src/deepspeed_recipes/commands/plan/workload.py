"""How much is to be trained: tokens, counted or estimated from the data, and the hours that there are for it."""

import argparse
import math
import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...planning.hardware.prices import prices
from ...planning.search.plans import Plan
from ...planning.search.run_cost import Workload
from ...recipe.errors import UserError
from ...recipe.recipe import Recipe, names
from ...training.data import text_files, updates
from ...training.data.forms import formats

CHARACTERS = 4
"""Of English text per token, about, with today's tokenizers; other languages have fewer."""
SCALES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
QUICK = 64 * 2**20
"""Bytes of data that are read before a run: about a second."""
HOURS = {"d": 24.0, "h": 1.0, "m": 1 / 60}


def workload(arguments: argparse.Namespace, recipe: Recipe, keys: Collection[str]) -> Workload | None:
    """Return what is to be trained; None where nobody has said how much.

    Args:
        arguments: with `tokens`, `price` and `spot` as typed.
        recipe: with the user's settings.
        keys: of the settings that the user has given; `data.path`, `epochs` and `max_steps` say how much, too.

    Raises:
        UserError: the tokens or a price are no number, or the data cannot be counted.
    """
    found = _workload(arguments, recipe, keys)
    if arguments.spot is None:
        return found
    if found is None:
        raise UserError("--spot: how much is to be trained? Add --tokens 500M, or data.path=... epochs=3.")
    return replace(found, node_hours=deadline(arguments.spot, "--spot"))


def _workload(arguments: argparse.Namespace, recipe: Recipe, keys: Collection[str]) -> Workload | None:
    known = prices(arguments.price)
    if arguments.tokens is not None:
        both = [key for key in ("epochs", "max_steps") if key in keys]
        if both:
            raise UserError(f"--tokens {arguments.tokens} and {both[0]}=...: give one of them.")
        return Workload(tokens(arguments.tokens), known)
    if recipe.max_steps and "max_steps" in keys:
        each = recipe.global_batch_size * recipe.sequence_length * recipe.traits.sequences
        return Workload(recipe.max_steps * each, known, f"{recipe.max_steps:,} steps")
    if "data.path" in keys or "epochs" in keys:
        counted, attended = tokens_of(recipe)
        about = f"{CHARACTERS} characters per token"
        return Workload(recipe.epochs * counted, known, about, document_length=attended)
    return None


def few_steps(plan: Plan, work: Workload) -> str | None:
    """Return what is wrong with a run's number of optimizer steps; None: nothing."""
    if (steps := work.steps(plan)) >= updates.ENOUGH:
        return None
    made = f"{steps} step{'s' * (steps > 1)} of {plan.recipe.global_batch_size} sequences"
    return (
        f"{made} are too few to learn much from: take a smaller global_batch_size, more epochs, or a shorter "
        "sequence_length."
    )


def tokens(text: str) -> float:
    """Return a number of tokens as people write it: `2e9`, `500M`, `1.5B`, `10_000_000`.

    Raises:
        UserError: it is no number, or not above 0.
    """
    match = re.fullmatch(r"([0-9][0-9.,_]*(?:e[0-9]+)?)\s*([kmbgt]?)", text.strip().lower())
    try:
        number = float(match[1].replace(",", "").replace("_", "")) * SCALES[match[2]] if match else math.nan
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise UserError(f"--tokens {text}: must be a number above 0, such as 500M, 2B or 1e9.")
    return number


def deadline(text: str, flag: str = "--deadline") -> float:
    """Return the hours of `8h`, `90m`, `2d` or `1d12h`.

    Raises:
        UserError: it is no such time.
    """
    parts = re.findall(r"([0-9.]+)\s*([dhm])", text.strip().lower())
    try:
        hours = sum(float(number) * HOURS[unit] for number, unit in parts)
    except ValueError:
        hours = 0.0
    if re.sub(r"[0-9.]+\s*[dhm]\s*", "", text.strip().lower()) or not 0 < hours < math.inf:
        raise UserError(f"{flag} {text}: must be a time above 0 with its unit, such as 8h, 90m or 2d.")
    return hours


def tokens_of(recipe: Recipe) -> tuple[float, float]:
    """Return about how many tokens an epoch has, and the document of a token on average, from local files' characters.

    No tokenizer is loaded.

    Raises:
        UserError: the data is not local text, or is not in a form that the method reads.
    """
    lengths = [_characters(example) for file in _files(recipe) for example in _examples(file, recipe)]
    if not sum(lengths):
        raise UserError(f"data.path={' '.join(names(recipe.data.path))}: holds no text to train on; give --tokens.")
    share = min(1.0, (recipe.data.max_examples or len(lengths)) / max(1, len(lengths)))
    whole = recipe.sequence_length * CHARACTERS  # longer documents are divided
    attended = sum(length * min(length, whole) for length in lengths) / sum(lengths)
    return max(1.0, share * sum(lengths) / CHARACTERS), max(1.0, attended / CHARACTERS)


def document_length(recipe: Recipe) -> float | None:
    """Return the tokens of the document that a token is in, on average; None without packing, or of large data."""
    try:
        small = recipe.packs and sum(file.stat().st_size for file in _files(recipe)) <= QUICK
        return tokens_of(recipe)[1] if small else None
    except UserError:
        return None


def _files(recipe: Recipe) -> Iterator[Path]:
    for name in names(recipe.data.path):
        path = Path(name) if Path(name).exists() else None
        files = sorted(each for each in path.iterdir() if each.is_file()) if path and path.is_dir() else [path]
        readable = [suffix for suffix in text_files.READ if suffix not in text_files.COLUMNAR]
        local = [file for file in files if file and file.suffix in readable]
        if path is None and (name.startswith(("/", ".", "~")) or Path(name).suffix in readable):
            raise UserError(f"data.path={name}: no such file.")
        if not local:
            raise UserError(
                f"data.path={name}: cannot be counted here, only local .jsonl, .json, .csv and .txt; give --tokens."
            )
        yield from local


def _examples(file: Path, recipe: Recipe) -> Iterator[dict[str, Any]]:
    located = text_files.read(file)
    if recipe.data.columns:  # their text is what counts, whatever the columns hold
        return (example for _, example in located)
    return formats.converted(located, recipe.method, recipe.data.form)


def _characters(value: Any) -> int:
    """Return the characters of all text in an example; a preference pair reads its prompt twice."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        twice = 2 if "chosen" in value else 1
        return sum(_characters(part) * (twice if key == "prompt" else 1) for key, part in value.items())
    return sum(_characters(part) for part in value) if isinstance(value, list) else 0
