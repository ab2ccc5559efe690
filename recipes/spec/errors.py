"""UserError, the base class of every error that the user can fix, and the rule that credentials are never written."""

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
