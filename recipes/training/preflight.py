"""What can be known to be wrong before a process is started: standard library only, so it costs milliseconds."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipes.spec.errors import UserError
from recipes.spec.pages import ROOT
from recipes.spec.recipe import Recipe

GIB = 2**30


def locate(recipe: Recipe) -> Recipe:
    """Return the recipe with its local paths made absolute, so that every rank and a later resume find them.

    A path is looked up from the current folder first, then from the project's root; the DeepSpeed file also in
    `configs/`. What is found nowhere and looks like a Hub id stays as it is.

    Raises:
        UserError: a file that does not exist.
    """
    data = replace(
        recipe.data,
        path=_local("data.path", recipe.data.path),
        validation=recipe.data.validation and _local("data.validation", recipe.data.validation),
    )
    model = replace(recipe.model, path=_local("model.path", recipe.model.path))
    deepspeed = _local("deepspeed", recipe.deepspeed, ROOT / "configs")
    return replace(recipe, data=data, model=model, deepspeed=deepspeed)


def _local(key: str, path: str, *folders: Path) -> str:
    for folder in (Path(), *folders, ROOT):
        if (folder / path).exists():
            return str((folder / path).resolve())
    looks_like_hub_id = (
        path.count("/") == 1 and not path.startswith((".", "/", "~")) and not Path(path).suffix[1:].isalpha()
    )
    if key in ("model.path", "data.path") and looks_like_hub_id:
        return path
    raise UserError(f"{key}={path}: no such file or folder.{_nearest(path, folders)}")


def _nearest(path: str, folders: tuple[Path, ...]) -> str:
    names = sorted(file.name for folder in folders for file in folder.glob("*.json"))
    return f" In configs/ there are: {', '.join(names)}." if names else ""


def check_data(recipe: Recipe) -> None:
    """Read every local data file once and refuse what training could not use.

    Raises:
        UserError: missing, empty, not UTF-8, not JSON at a line, or a line that lacks what the method needs.
    """
    for path in (recipe.data.path, recipe.data.validation):
        if path and Path(path).is_file():
            check_file(Path(path), recipe.method)


def check_file(path: Path, method: str) -> int:
    """Check one JSON Lines file for a method and return how many examples it holds.

    Raises:
        UserError: names the file, the line, the field and the fix.
    """
    check = _CHECKS[method]
    count = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            check(f"{path}:{number}", _parse(f"{path}:{number}", line))
            count += 1
    if not count:
        raise UserError(f"{path}: empty; one JSON object per line is expected.")
    return count


def _parse(where: str, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 at byte {error.start}; save the file as UTF-8.") from None
    except (json.JSONDecodeError, RecursionError) as error:
        reason = getattr(error, "msg", "nested too deeply")
        raise UserError(f"{where}: not JSON ({reason}); one JSON object per line is expected.") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: a {type(row).__name__}, not a JSON object.")
    return row


def _check_text(where: str, row: dict[str, Any]) -> None:
    if not isinstance(row.get("text"), str):
        raise UserError(f"{where}: the field 'text' must be a string; this line has {_fields(row)}.")


def _check_conversation(where: str, row: dict[str, Any]) -> None:
    _check_turns(where, row, "messages")
    if not any(turn["role"] == "assistant" and turn["content"] for turn in row["messages"]):
        raise UserError(f"{where}: no assistant turn in 'messages', so nothing to learn from; remove the line.")


def _check_preference(where: str, row: dict[str, Any]) -> None:
    for field in ("prompt", "chosen", "rejected"):
        _check_turns(where, row, field)


def _check_turns(where: str, row: dict[str, Any], field: str) -> None:
    turns = row.get(field)
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{where}: the field {field!r} must be a list of turns; this line has {_fields(row)}.")
    for turn in turns:
        if not (isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)):
            raise UserError(f"{where}: every turn in {field!r} needs a 'role' and a 'content', both strings.")


def _fields(row: dict[str, Any]) -> str:
    return ", ".join(repr(key) for key in row) or "no fields"


_CHECKS: dict[str, Callable[[str, dict[str, Any]], None]] = {
    "sft": _check_conversation,
    "dpo": _check_preference,
    "pretrain": _check_text,
}


def checkpoint_bytes(total: int, trainable: int, bytes_per_weight: int) -> int:
    """Return what one checkpoint takes on disk, in bytes, for `total` and `trainable` parameters.

    The engine's states are 12 bytes per trainable parameter (fp32 weight and two Adam moments, measured for
    ZeRO 1-3); beside them lie the weights, once as the engine's module state and once in Hugging Face form.
    With adapters only the trainable part is written. A tenth is added for everything else.
    """
    weights = trainable if trainable < total else total
    return int(1.1 * (12 * trainable + 2 * bytes_per_weight * weights)) + 2**20


def check_disk(folder: Path, needed: int, what: str) -> None:
    """Refuse to write `needed` bytes where there is no room for them.

    Raises:
        UserError: names the folder, what is free and what is needed.
    """
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UserError(
            f"{folder}: {what} needs about {needed / GIB:.2f} GiB, and {free / GIB:.2f} GiB is free.\n"
            "Free some room, choose another --output-dir, or write less often (save_steps=0: only the export)."
        )
