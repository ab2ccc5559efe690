"""Checks that a teacher has the student's vocabulary, and positions for its sequences.

Standard library only: the launcher compares local folders before it starts anything.
"""

from collections.abc import Mapping
from pathlib import Path

from ....recipe.compatibility import positions
from ....recipe.errors import UserError
from ....recipe.files import JsonView
from ....recipe.recipe import Recipe
from ....recipe.run_folder import read_json


def tokens(folder: Path, special: bool = True) -> dict[str, int]:
    """Return the tokens in a folder's tokenizer.json with their numbers; empty if the file does not exist.

    `special` tokens are those that only templates write; ordinary text is never read as these.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return {}
    content = read_json(file)
    try:
        known = content["model"].get("vocab", {})
        if isinstance(known, list):  # Unigram: pieces with their scores, in the order of their numbers
            known = {piece: number for number, (piece, _) in enumerate(known)}
        added = {one["content"]: (one["id"], one.get("special")) for one in content.get("added_tokens") or ()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{file}: not a tokenizer of Hugging Face's; download it again.") from error
    numbers = {**known, **{token: number for token, (number, _) in added.items()}}
    return numbers if special else {token: numbers[token] for token in numbers if not added.get(token, (0, 0))[1]}


def check(teacher: str, ours: Mapping[str, int], theirs: Mapping[str, int]) -> None:
    """Refuse a teacher (a folder or Hub id) whose tokens and their numbers are not the model's."""
    differing = {token for token, _ in ours.items() ^ theirs.items()}
    if differing:
        example = min(differing)
        numbers = f"{example!r} is {ours.get(example, 'missing')} in the model, {theirs.get(example, 'missing')} there"
        raise UserError(
            f"distill.teacher={teacher}: another vocabulary: {len(differing):,} tokens differ ({numbers}).\n"
            "A token's number must mean the same in both models; use a teacher of the model's own family."
        )


def check_positions(teacher: str, config: JsonView, recipe: Recipe) -> None:
    """Refuse a teacher with fewer positions than a sequence has tokens; `config` is its config.json."""
    most = positions(config)
    if recipe.sequence_length > most:
        raise UserError(
            f"distill.teacher={teacher}: the teacher has {most:,} positions, and sequence_length is "
            f"{recipe.sequence_length:,}; set sequence_length={most}, or use a teacher with more."
        )
