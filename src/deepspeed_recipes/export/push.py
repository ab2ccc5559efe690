"""Publishes a model folder on the Hub in one commit, completely or not at all."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import huggingface_hub
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from ..recipe.errors import UserError, first_line
from ..training.model_folder.card import UNPUBLISHED
from .contents import CARD, File

HUBS_OWN = {".gitattributes"}
"""Files that the Hub itself adds to a new repository."""
_SHOWN = 4


@dataclass(frozen=True)
class Target:
    """The repository before the push."""

    name: str
    commit: str | None
    """The newest commit, or None if the repository does not exist yet."""


def check_name(name: str) -> None:
    """Refuse a name that is not valid for a repository.

    Raises:
        UserError: not OWNER/NAME.
    """
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"{name}: not a name for the Hub: {first_line(error)}") from None
    if name.count("/") != 1:
        raise UserError(f"{name}: name the owner too, OWNER/NAME (`hf auth whoami` prints your user name).")


def look(name: str, files: Sequence[File], private: bool) -> Target:
    """Return the repository to push to, with its current commit, or None for the commit of a new one.

    Raises:
        UserError: no token, no network, a repository with other files, or a public repository despite `private`.
    """
    if huggingface_hub.get_token() is None:
        raise UserError("no token for the Hub; log in with `hf auth login`, or set HF_TOKEN.")
    with _explained(name):
        try:
            found = HfApi().repo_info(name)
        except RepositoryNotFoundError:
            return Target(name, None)
    ours = {file.name for file in files}
    others = sorted({file.rfilename for file in found.siblings or ()} - ours - HUBS_OWN)
    if others:
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        raise UserError(f"{name} exists, with other files: {', '.join(others[:_SHOWN])}{more}; choose another name.")
    if private and not found.private:
        raise UserError(f"{name} exists and is public; make it private on the Hub first, or leave out --private.")
    return Target(name, found.sha)


def push(target: Target, files: Sequence[File], private: bool) -> str:
    """Push the files in one commit and return its address. If that fails, a newly created repository is removed.

    Raises:
        UserError: the Hub refuses, or cannot be reached.
    """
    api = HfApi()
    with _explained(target.name):
        if target.commit is None:
            api.create_repo(target.name, private=private)
        try:
            added = [CommitOperationAdd(file.name, content(file, target.name)) for file in files]
            done = api.create_commit(
                target.name, added, commit_message="Publish the model", parent_commit=target.commit
            )
        except BaseException:
            if target.commit is None:
                with contextlib.suppress(Exception):
                    api.delete_repo(target.name)
            raise
    return str(done.commit_url)


def content(file: File, name: str) -> str | bytes:
    """Return the path of the file to upload or, for the card, its text with the model's name on the Hub."""
    if file.name != CARD:
        return str(file.path)
    text = file.path.read_text(encoding="utf-8")
    return text.replace(f'"{UNPUBLISHED}"  # or this folder', f'"{name}"').encode()


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
