"""What of an exported folder goes out when it is published: the model, its card and its record, and nothing else."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ..recipe.errors import UserError, redact
from ..recipe.run_folder import CHECK_FAILED, read_json
from ..training.model_folder import head, record, sentence_transformers
from ..training.model_folder.base_model import ADAPTER, KEY, QUANTIZATION, is_hub_id
from ..training.model_folder.portable import portable

CARD = "README.md"
_WEIGHTS = re.compile(r"(?:model|adapter_model)(?:-\d+-of-\d+)?\.safetensors|model-\w+\.gguf")
_CONFIGURATION = {
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    ADAPTER,
    QUANTIZATION,
    head.LABELS,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "preprocessor_config.json",
    "processor_config.json",
}
_VOCABULARY = {"tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model"}
"""Too many words, any of which may look like a credential."""
_TEXT = {CARD, "LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE", "chat_template.jinja", "Modelfile"}
_RECORD = {f"{record.FOLDER}/{name}" for name in (record.RECIPE, record.DEEPSPEED, record.RESULTS)}
_KNOWN = {*_CONFIGURATION, *_VOCABULARY, *_TEXT, *_RECORD, *sentence_transformers.FILES}
_SHOWN = 4


@dataclass(frozen=True)
class File:
    """A file that goes out."""

    path: Path
    name: str
    """In the repository."""
    size: int
    """Bytes."""


def files(folder: Path) -> list[File]:
    """Return what goes out of `folder`, in the order of names.

    Raises:
        UserError: the folder is not a model's, or holds a file that does not belong to a model, a credential, a path
            on this machine, or an adapter whose base model others cannot find.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder.")
    nothing = f"{folder}: not a model folder: name a run's export/, or what ds-recipes export wrote."
    if not any(map(_WEIGHTS.fullmatch, os.listdir(folder))):  # before all of a disk is listed
        raise UserError(nothing)
    found = {
        str(path.relative_to(folder)): path
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or not path.is_dir()
    }
    if CHECK_FAILED in found:
        raise UserError(f"{folder}: this export failed its check: it computes other logits than the trained model.")
    described = {"config.json", ADAPTER} & set(found) or any(name.endswith(".gguf") for name in found)
    if not described:
        raise UserError(nothing)
    others = [name for name, path in found.items() if path.is_symlink() or not _is_model(name)]
    if others:
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        raise UserError(
            f"{folder}: {', '.join(others[:_SHOWN])}{more}: no part of a model; remove it, or write a clean folder "
            "with ds-recipes export FOLDER --output DIR."
        )
    held = record.read(folder)
    commit = str((held.results.get("environment") or {}).get("git_commit") or "") if held else ""
    for name, path in found.items():
        _check(name, path, commit.partition("+")[0])
    _check_base(folder)
    return [File(path, name, path.stat().st_size) for name, path in found.items()]


def _is_model(name: str) -> bool:
    return bool(_WEIGHTS.fullmatch(name)) or name in _KNOWN


def _check(name: str, path: Path, commit: str) -> None:
    """Refuse a file with a credential, or with a path of this machine.

    Args:
        name: in the repository.
        path: of the file.
        commit: of the project, which looks like a key of W&B and is none.

    Raises:
        UserError: names the file.
    """
    if _WEIGHTS.fullmatch(name):
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    if name in _VOCABULARY:
        secret = any(value in text for value in _credentials())
    else:
        text = text.replace(commit, "") if commit else text
        secret = redact(text) != text
    if secret:
        raise UserError(f"{path}: holds what looks like a credential; take it out before the folder is published.")
    if name in _RECORD | {ADAPTER, "config.json"}:
        values = read_json(path)
        if portable(values) != values:
            raise UserError(f"{path}: names a path of this machine; write the folder again with ds-recipes export.")


def _credentials() -> list[str]:
    """Return the values of this machine's variables that are credentials."""
    return [
        value
        for name, value in os.environ.items()
        if redact(f"{name}={value}") != f"{name}={value}" and len(value) >= 8
    ]


def _check_base(folder: Path) -> None:
    """Refuse an adapter whose base model is not on the Hub.

    Raises:
        UserError: says what to do.
    """
    if not (folder / ADAPTER).exists():
        return
    base = str(read_json(folder / ADAPTER).get(KEY) or "")
    if not is_hub_id(base):
        raise UserError(
            f"{folder}: an adapter for {base or 'an unnamed base model'}, which is not on the Hub, so nobody could use "
            "it;\npublish the merged model (ds-recipes export RUN --output DIR --merge), or name one on the Hub in "
            f"{ADAPTER}."
        )
