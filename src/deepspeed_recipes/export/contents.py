"""Selects the files of an exported folder to publish: the model, its card and its record, and nothing else."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ..recipe.errors import UserError, redact
from ..recipe.run_folder import CHECK_FAILED, read_json
from ..training.model_folder import head, intact, record, sentence_transformers, weights
from ..training.model_folder.base_model import ADAPTER, EXPECTED, KEY, QUANTIZATION, is_hub_id
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
    head.PROVENANCE,
    EXPECTED,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
}
_VOCABULARY = {"tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model"}
"""Files with so many words that one may look like a credential."""
_TEXT = {CARD, "LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE", "chat_template.jinja", "Modelfile"}
_RECORD = {f"{record.FOLDER}/{name}" for name in (record.RECIPE, record.DEEPSPEED, record.RESULTS)}
_KNOWN = {*_CONFIGURATION, *_VOCABULARY, *_TEXT, *_RECORD, *sentence_transformers.FILES}
_SHOWN = 4


@dataclass(frozen=True)
class File:
    """A file to publish."""

    path: Path
    name: str
    """Path in the repository."""
    size: int
    """Bytes."""


def files(folder: Path) -> list[File]:
    """Return the files of `folder` to publish, sorted by name.

    Raises:
        UserError: `folder` is not a model folder, contains a file that is not part of a model, that is cut off or
            unreadable, a credential, a path on this machine, or an adapter whose base model is not on the Hub.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder.")
    no_model = f"{folder}: not a model folder; name a run's export/, or a folder that ds-recipes export wrote."
    if not any(map(_WEIGHTS.fullmatch, os.listdir(folder))):  # before `rglob`, which could list a whole disk
        raise UserError(no_model)
    found = {
        str(path.relative_to(folder)): path
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or not path.is_dir()
    }
    if CHECK_FAILED in found:
        raise UserError(f"{folder}: this export failed its check: its logits differ from the trained model's.")
    described = {"config.json", ADAPTER} & set(found) or any(name.endswith(".gguf") for name in found)
    if not described:
        raise UserError(no_model)
    others = [
        name for name, path in found.items() if path.is_symlink() or not (_WEIGHTS.fullmatch(name) or name in _KNOWN)
    ]
    if others:
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        raise UserError(
            f"{folder}: {', '.join(others[:_SHOWN])}{more}: not part of a model; remove it, or write a clean folder "
            "with ds-recipes export FOLDER --output DIR."
        )
    held = record.read(folder)
    commit = str((held.results.get("environment") or {}).get("git_commit") or "") if held else ""
    for name, path in found.items():
        _check(name, path, commit.partition("+")[0])
    _check_base(folder)
    intact.check(folder)
    if "config.json" in found and any(name.endswith(".safetensors") for name in found):
        weights.tensors(folder, "model")
    return [File(path, name, path.stat().st_size) for name, path in found.items()]


def _check(name: str, path: Path, commit: str) -> None:
    """Refuse a file with a credential, or with a path on this machine.

    Args:
        name: the file's path in the repository.
        path: the file.
        commit: the project's git commit, which looks like a W&B key and is accepted.

    Raises:
        UserError: names the file.
    """
    if _WEIGHTS.fullmatch(name):
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    if name in _VOCABULARY:
        known = {f"{name}={value}": value for name, value in os.environ.items() if len(value) >= 8}
        secret = any(value in text for given, value in known.items() if redact(given) != given)
    else:
        text = text.replace(commit, "") if commit else text
        secret = redact(text) != text
    if secret:
        raise UserError(f"{path}: has text that looks like a credential; remove it before you publish the folder.")
    if name in _RECORD | {ADAPTER, "config.json"}:
        values = read_json(path)
        if portable(values) != values:
            raise UserError(f"{path}: names a path on this machine; write the folder again with ds-recipes export.")


def _check_base(folder: Path) -> None:
    """Refuse an adapter whose base model is not on the Hub."""
    if not (folder / ADAPTER).exists():
        return
    base = str(read_json(folder / ADAPTER).get(KEY) or "")
    if not is_hub_id(base):
        raise UserError(
            f"{folder}: an adapter for {base or 'an unnamed base model'}, which is not on the Hub, so others could not "
            "use it;\npublish the merged model (ds-recipes export RUN --output DIR --merge), or name a base model on "
            f"the Hub in {ADAPTER}."
        )
