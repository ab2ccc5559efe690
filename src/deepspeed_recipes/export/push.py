"""Publishes a model folder on the Hub in one commit, completely or not at all: the model, its card and its record."""

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import huggingface_hub
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from ..recipe.errors import UserError, first_line, redact
from ..recipe.run_folder import CHECK_FAILED, read_json
from ..training.model_folder import base_model, complete, record, weights
from ..training.model_folder.base_model import ADAPTER, EXPECTED, KEY, QUANTIZATION, is_hub_id
from ..training.model_folder.card import UNPUBLISHED
from ..training.model_folder.record import portable

CARD = "README.md"
_WEIGHTS = re.compile(r"(?:model|adapter_model|further_token)(?:-\d+-of-\d+)?\.safetensors|model-\w+\.gguf")
_CONFIGURATION = {
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    ADAPTER,
    QUANTIZATION,
    base_model.LABELS,
    base_model.PROVENANCE,
    EXPECTED,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
}
_VOCABULARY = {"tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model"}
"""Files with so many words that some may look like credentials."""
_TEXT = {CARD, "LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE", "chat_template.jinja", "Modelfile"}
_RECORD = {f"{record.FOLDER}/{name}" for name in (record.RECIPE, record.DEEPSPEED, record.RESULTS)}
_KNOWN = {*_CONFIGURATION, *_VOCABULARY, *_TEXT, *_RECORD, *complete.FILES}
_TIKTOKEN = ".tiktoken"
"""Suffix of a vocabulary."""
_NAMED = 4


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

    Refuses what is not a model folder, and files that do not belong to a model, are cut off or unreadable, or contain
    a credential or a path on this machine. The base model of an adapter has to be on the Hub.
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
    own_code = any("auto_map" in read_json(folder / name, {}) for name in ("config.json", "tokenizer_config.json"))
    suffixes = (_TIKTOKEN, ".py") if own_code else (_TIKTOKEN,)
    known = _KNOWN | {name for name in found if name.endswith(suffixes)}
    others = [
        name for name, path in found.items() if path.is_symlink() or not (_WEIGHTS.fullmatch(name) or name in known)
    ]
    if others:
        raise UserError(
            f"{folder}: {', '.join(others[:_NAMED])}{weights.more(others, _NAMED)}: not part of a model; remove it."
        )
    held = record.read(folder)
    commit = str((held.results.get("environment") or {}).get("git_commit") or "") if held else ""
    for name, path in found.items():
        _check(name, path, commit.partition("+")[0])
    base = str(read_json(folder / ADAPTER).get(KEY) or "") if ADAPTER in found else None
    if base is not None and not is_hub_id(base):
        raise UserError(
            f"{folder}: an adapter for {base or 'an unnamed base model'}, which is not on the Hub, so others could not "
            "use it;\npublish the merged model (ds-recipes export RUN --output DIR --merge), or name a base model on "
            f"the Hub in {ADAPTER}."
        )
    weights.check_intact(folder)
    if "config.json" in found and any(name.endswith(".safetensors") for name in found):
        weights.tensors(folder, "model")
    return [File(path, name, path.stat().st_size) for name, path in found.items()]


def _check(name: str, path: Path, commit: str) -> None:
    """Refuse a file with a credential, or with a path on this machine.

    `name` is its path in the repository. `commit`, the project's git commit, looks like a W&B key and is accepted.
    """
    if _WEIGHTS.fullmatch(name):
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    if name in _VOCABULARY or name.endswith(_TIKTOKEN):
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


@dataclass(frozen=True)
class Target:
    """The repository before the push."""

    name: str
    commit: str | None
    """The newest commit, or None if the repository does not exist yet."""


def check_name(name: str) -> None:
    """Refuse a name that is not valid for a repository."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"{name}: not a name for the Hub: {first_line(error)}") from None
    if name.count("/") != 1:
        raise UserError(f"{name}: name the owner too, OWNER/NAME (`hf auth whoami` prints your user name).")


def look(name: str, files: Sequence[File], private: bool) -> Target:
    """Return the repository to push to, with its current commit, or None for the commit of a new one.

    Refuses a repository with other files, and a public one despite `private`.
    """
    if huggingface_hub.get_token() is None:
        raise UserError("no token for the Hub; log in with `hf auth login`, or set HF_TOKEN.")
    with _explained(name):
        try:
            found = HfApi().repo_info(name)
        except RepositoryNotFoundError:
            return Target(name, None)
    ours = {".gitattributes", *(file.name for file in files)}  # the Hub itself adds the first to a new repository
    others = sorted({file.rfilename for file in found.siblings or ()} - ours)
    if others:
        shown = ", ".join(others[:_NAMED]) + weights.more(others, _NAMED)
        raise UserError(f"{name} exists, with other files: {shown}; choose another name.")
    if private and not found.private:
        raise UserError(f"{name} exists and is public; make it private on the Hub first, or leave out --private.")
    return Target(name, found.sha)


def push(target: Target, files: Sequence[File], private: bool) -> str:
    """Push the files in one commit and return its address. If that fails, a newly created repository is removed."""
    api = HfApi()
    with _explained(target.name):
        if target.commit is None:
            api.create_repo(target.name, private=private)
        try:
            contents: dict[str, str | bytes] = {file.name: str(file.path) for file in files}
            if CARD in contents:  # with the model's name on the Hub
                text = Path(str(contents[CARD])).read_text(encoding="utf-8")
                contents[CARD] = text.replace(f'"{UNPUBLISHED}"  # or this folder', f'"{target.name}"').encode()
            added = [CommitOperationAdd(name, content) for name, content in contents.items()]
            done = api.create_commit(
                target.name, added, commit_message="Publish the model", parent_commit=target.commit
            )
        except BaseException:
            if target.commit is None:
                with contextlib.suppress(Exception):
                    api.delete_repo(target.name)
            raise
    return str(done.commit_url)


def show(folder: Path, name: str, files: Sequence[File], private: bool) -> str:
    """Return the list of files to publish, as text."""
    width = max(len(file.name) for file in files)
    lines = [f"{folder} -> {name} ({'private' if private else 'public'})"]
    lines += [f"  {file.name:<{width}}  {_size(file.size):>10}" for file in files]
    return "\n".join([*lines, f"  {'total':<{width}}  {_size(sum(file.size for file in files)):>10}"])


def _size(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB" if size >= 2**20 else f"{size / 2**10:,.1f} KiB"


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn the Hub's errors into one line."""
    try:
        yield
    except OfflineModeIsEnabled:
        raise UserError("HF_HUB_OFFLINE is set, so nothing can be published; unset it.") from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        if status in (401, 403):
            raise UserError(
                f"{name}: the Hub refuses this token ({status}); use a token with write access to the repository."
            ) from None
        raise UserError(f"{name}: the Hub answered {status}: {first_line(error)}") from None
    except (httpx.HTTPError, OSError) as error:
        raise UserError(f"{name}: the Hub cannot be reached ({type(error).__name__}: {first_line(error)}).") from None
