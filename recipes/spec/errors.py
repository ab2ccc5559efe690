"""UserError, the base class of every error that the user can fix, and the rule that credentials are never written."""

import errno
import os
import re
from collections.abc import Mapping

_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIAL", re.IGNORECASE)
# Hugging Face tokens, W&B keys (40 hexadecimal digits, or the newer prefixed form), user:password@host.
_SECRET_VALUE = re.compile(r"hf_[A-Za-z0-9]{16,}|wandb_v\d_\w{16,}|\b[0-9a-f]{40}\b|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")


class UserError(Exception):
    """A mistake that the user can fix: one to three lines naming the file or key, the value and the fix.

    Every command prints the text without a traceback and exits with status 2.
    """


def first_line(error: Exception) -> str:
    """Return the first line of a library's error message; the rest is usually advice for programmers."""
    return str(error).strip().partition("\n")[0]


_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "your quota on this disk is used up",
    errno.EROFS: "this disk is read-only",
}
_FULL_TEXTS = {
    "No space left on device": errno.ENOSPC,
    "Disk quota exceeded": errno.EDQUOT,
    "Read-only file system": errno.EROFS,
    # torch's, which does not say why; and it says so about full disks only, having opened the file.
    "PytorchStreamWriter failed": errno.ENOSPC,
    "unexpected pos": errno.ENOSPC,
}
"""What libraries that are not written in Python say."""


def cannot_write(error: BaseException, where: object = None) -> str | None:
    """Return a line about a disk that is full or read-only, or a quota that is used up; None: that is not the cause.

    Args:
        error: what a library has raised; what caused it counts too.
        where: the folder that was written to, for errors that do not say which file it was.
    """
    cause: BaseException | None = error
    while cause is not None:
        number = cause.errno if isinstance(cause, OSError) and cause.errno in _FULL else None
        number = number or next((known for text, known in _FULL_TEXTS.items() if text in str(cause)), None)
        if number:
            file = getattr(cause, "filename2", None) or getattr(cause, "filename", None) or where or "a file"
            return f"{file}: cannot be written, {_FULL[number]}; free some space or choose a folder on another disk."
        cause = cause.__cause__ or cause.__context__
    return None


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable's name or value looks like a credential."""
    return bool(_SECRET_NAME.search(name) or _SECRET_VALUE.search(value))


def redact(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return `text` with everything that looks like a credential replaced by `***`.

    This covers the known token formats and the value of every environment variable whose name marks it as a secret,
    so that `command.txt` and our own messages can be shared.
    """
    for name, value in environ.items():
        if _SECRET_NAME.search(name) and len(value) >= 8:
            text = text.replace(value, "***")
    return _SECRET_VALUE.sub("***", text)
