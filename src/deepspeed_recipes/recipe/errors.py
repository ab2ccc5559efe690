"""`UserError`, the base class of every error that the user can fix, and the redaction of credentials."""

import contextlib
import errno
import logging
import os
import re
from collections.abc import Container, Iterator, Mapping
from typing import Any

# Patterns are compiled at their first use: these take longer than any other line of a short command's start.
_SECRET_NAME = (
    r"(?i)"
    r"TOKEN(?!IZ)|SECRET|(?<!ASK)PASS(?:WOR[DT]|WD|PHRASE|_|$)|KENNWORT|_PW$|(?:API|ACCESS|PRIVATE)_?KEY|CREDENTIAL|HEADERS?(?:_|$)"
    r"|AUTHORIZATION|_AUTH(?:_CONFIG)?$|COOKIE|SIGNATURE|WEBHOOK|_DSN$|_SAS$|CONNECTION_STRING"
    r"|(?-i:(?<!PUBLIC)_(?:KEY|PWD|PAT|CREDS|JWT)$)"  # only variables: a `sort_key` is none
)
_SECRET_VALUE = (
    # https://TOKEN@host, https://user:p@ssword@host, and a password with a slash, which is not a port
    r"(?<=://)[^/?#\s'\"]+(?=@)|(?<=://)[^/?#\s'\":]+:(?!\d{1,5}/)[^?#\s'\"@]+(?=@)"
    r"|(?<=%3A%2F%2F)[^/?#&\s'\"]+?(?=%40)"
    r"|\bhf_(?:oauth_)?[A-Za-z0-9]{16,}|\bapi_org_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|wandb_v\d_\w{16,}|\b[0-9a-f]{40}\b"  # W&B: prefixed, or 40 hexadecimal digits
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|gl(?:pat|dt|rt|ptt|cbt)-[\w-]{16,}"  # GitHub, GitLab
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[\w-]{30,}|\bGOCSPX-[\w-]{20,}"  # AWS, Google
    r"|\bgsk_[A-Za-z0-9]{20,}|\bnvapi-[\w-]{20,}|\br8_[A-Za-z0-9]{20,}|\bdapi[0-9a-f]{32}\b|\bya29\.[\w-]{20,}"
    r"|\bsk-(?=[\w-]*\d)[\w-]{16,}|\bxox[a-z]-[\w-]{10,}|\bnpm_[A-Za-z0-9]{30,}|\bpypi-[\w-]{30,}"
    r"|\b[sr]k_(?:live|test)_\w{16,}|\bSG\.[\w-]{16,}\.[\w-]{16,}|\b(?:do[opr]_v1|sbp)_[0-9a-f]{32,}"
    r"|\bAGE-SECRET-KEY-1\w{40,}|\b\d{8,10}:AA[\w-]{30,}"  # age, Telegram
    r"|\bxai-[A-Za-z0-9]{40,}|\bdckr_[po]at_[\w-]{20,}|\blsv2_[ps][tk]_\w{20,}"  # xAI, Docker, LangSmith
    r"|(?<=hooks\.slack\.com/services/)[\w/]+|(?<=/api/webhooks/)[\w/-]+"  # Slack, Discord
    r"|\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*|\beyJ[\w-]{40,}"  # JSON web tokens, tokens of encoded JSON
    r"|-----BEGIN [A-Z ]*PRIVATE KEY[A-Z ]*-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY[A-Z ]*-----|\Z)"
    # user:password@host, but neither DeepSpeed's host:0,2@host nor image:tag@sha256:digest.
    r"|(?<![\w./@:-])[\w.+%-]+:(?!//)(?!(?:\d{1,2},)*\d{0,2}@)[^\s:@/'\"]+(?=@(?!sha256:)\w)"
)
_NAMED = (
    r"\b(?:[\w-]{0,40}[_-])?(?:passwor[dt]|kennwort|passwd|passphrase|secret|credentials?"
    r"|(?:api|access|private|secret|account|encryption|signing)[_-]?key"
    r"|(?:auth|access|api|hub|hf|bearer|refresh|session|secret|security)[_-]?token)"
)
_SECRET_PART = (
    r"(?i)([?&#](?:[\w-]{0,40}[_-])?(?:Signature|Credential|AWSAccessKeyId|sig|token|jwt|auth|code|(?:api)?key|passw(?:or)?d"
    r"|pass|pwd?|secret)=)[^&\s'\"]+"
    r"|((?:authorization|x-api-key|cookie)['\"]?\s*[:=]\s*['\"]?(?:(?:Basic|Bearer|Digest|Token)(?:\s|%20)+)?)[^\s,'\"]+"
    r"|(\bBearer(?:\s|%20)+)[\w.~+/=-]{8,}|(\bBasic(?:\s|%20)+)(?=\S*[\d=])[\w+/=-]{16,}"
    rf"|({_NAMED}\\?['\"]\]?\s*[:=]\s*\\?['\"])[^'\"\\]+"
    rf"|({_NAMED}\s*[:=]\s*['\"]?)(?!\w+://)(?=\S*\d)[^\s'\",;&]{{8,}}"
    r"|(\b(?:key|token|auth)\\?['\"]?\s*[:=]\s*\\?['\"]?)(?=[A-Za-z_-]*\d)(?=[\d_-]*[A-Za-z])[\w-]{16,}"
    rf"|({_NAMED}['\"]?\s*:[ \t]*[|>][+-]?\d?[ \t]*\n(?P<indent>[ \t]+))[^\n]+(?:\n(?P=indent)[^\n]*)*"  # YAML's blocks
    rf"|({_NAMED}\s+(?:is\s+)?['\"]?)[0-9a-f]{{64}}\b"
    r"|(\b(?:mysql|mariadb)[\w-]*\s(?:[^\n;&|]{0,500}?\s)?(?-i:-p)['\"]?)[^\s;'\"]+"
    rf"|(--(?:{_NAMED}|token)(?:=|\s+)['\"]?)[^\s'\"-][^\s'\"]*"
    r"|((?:\s-u|--user)\s+[^\s:/]+:|\bsshpass\s+-p\s*|\b(?:docker|podman)\s+login\s[^\n;&|]{0,200}?-p\s+|\blogin\s+\S+\s+password\s+|;\s*PWD=)[^\s;'\"]+"
)
"""Values after a name that marks a secret: in a signed URL, a request header, JSON, YAML or an option."""
_SECRET_KEY = (
    r"(?i)(?:.*_)?(?:passwor[dt]|kennwort|passwd|passphrase|pwd|secret|credentials?|cookie|jwt|(?:api|access|private|secret|account)_?key)"
    r"|key|token|auth|(?:.*_)?(?:auth|access|api|hub|hf|bearer|refresh|session|secret|security)_?token|authorization"
)
"""Keys whose values are credentials; `pad_token` does not match."""
_ASSIGNMENT = r"\b(\w+)=('[^']*'|\"[^\"]*\"|[^\s'\"]+)"


class UserError(Exception):
    """A mistake that the user can fix: one to three lines naming the file or key, the value and the fix.

    Every command prints the text without a traceback and exits with status 2.
    """


class NotJson(UserError):
    """A file that should be JSON is not."""


class FileUnusable(UserError):
    """A file or folder that the system refuses to read or write now; its content may be intact."""


@contextlib.contextmanager
def errors_only(library: str) -> Iterator[None]:
    """Silence a library's warnings about settings that are refused elsewhere, or that the user cannot change."""
    logger = logging.getLogger(library)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def counted(number: int, what: str) -> str:
    """Return `1 rank`, `2,000 ranks`."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def first_sentence(text: str) -> str:
    """Return a text's first sentence without its stop, which `et al.`, `e.g.`, `i.e.` and `vs.` do not contain."""
    return re.split(r"(?<!\bal)(?<!\be\.g)(?<!\bi\.e)(?<!\bvs)\.(?:\s|$)", text, maxsplit=1)[0]


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error message; the rest is usually advice for programmers."""
    return str(error).strip().partition("\n")[0]


_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "your quota on this disk is used up",
    errno.EROFS: "this disk is read-only",
    errno.EFBIG: "files may not be that large here (ulimit -f, or the file system)",
}
_ACCESS = "check with ls -l who may use it and the folders above it"
_AGAIN = "try again once the disk or the server answers"
_LASTING = {
    errno.EACCES: _ACCESS,
    errno.EPERM: _ACCESS,
    errno.EISDIR: "name a file",
    errno.ENOTDIR: "name a folder",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "remove the links that lead in a circle",
    errno.EFBIG: "choose a folder on another disk",
}
_PASSING = {
    errno.EIO: _AGAIN,
    errno.ESTALE: _AGAIN,
    errno.ETIMEDOUT: _AGAIN,
    errno.ENOTCONN: _AGAIN,  # the process of a user-space file system has ended
    errno.EREMOTEIO: _AGAIN,
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "try again with fewer processes on this machine",
    errno.ENOMEM: "try again with more memory free",
}
"""Fixes for errors that may pass; another try may succeed."""
_IN_THE_WAY = {
    errno.EEXIST: "a file is in the way: remove it, or choose another name",
    errno.ENOENT: "check its name and the folders above it",
}
"""Fixes for errors that are the user's only where the command line names the file."""
_FULL_TEXTS = {
    "No space left on device": errno.ENOSPC,
    "Disk quota exceeded": errno.EDQUOT,
    "Read-only file system": errno.EROFS,
    "File too large": errno.EFBIG,
    # torch gives no reason, but raises these only for a full disk, after it has opened the file.
    "PytorchStreamWriter failed": errno.ENOSPC,
    "unexpected pos": errno.ENOSPC,
}
"""Messages of libraries that are not written in Python, and the error that each means."""


def cannot_write(error: BaseException, where: object = None) -> str | None:
    """Return a line about a full or read-only disk or an exhausted quota, or None if the error has another cause.

    The causes of a library's exception are searched too; `where` was written to, for errors that do not name the file.
    """
    cause: BaseException | None = error
    while cause is not None:
        number = cause.errno if isinstance(cause, OSError) and cause.errno in _FULL else None
        number = number or next((known for text, known in _FULL_TEXTS.items() if text in str(cause)), None)
        if number:
            file = _file_of(cause) or where or "a file"
            fix = "" if number in (errno.EROFS, errno.EFBIG) else "free some space or "
            return f"{file}: cannot be written, {_FULL[number]}; {fix}choose a folder on another disk."
        cause = cause.__cause__ or cause.__context__
    return None


def lasting(error: BaseException, where: object = None) -> str | None:
    """Return a line about a file that the system refuses for a lasting reason, including a full disk, or None.

    Only causes that are themselves system errors count: an exception that our own code raises while it handles a system
    error is our defect. `where` is as for `cannot_write`.
    """
    cause = _cause(error, _LASTING)
    return cannot_write(error, where) or (of_system(cause, where) if cause and (_file_of(cause) or where) else None)


def passing(error: BaseException) -> str | None:
    """Return a line about a file that the system refuses for a reason that may pass, or None; see `lasting`."""
    cause = _cause(error, _PASSING)
    return of_system(cause) if cause and _file_of(cause) else None


def _cause(error: BaseException, numbers: Container[int]) -> OSError | None:
    cause: BaseException | None = error
    while isinstance(cause, OSError) and cause.errno not in numbers:
        cause = cause.__cause__ or cause.__context__
    return cause if isinstance(cause, OSError) else None


def of_system(error: OSError, where: object = None) -> str:
    """Return a line about any system error: the file, the reason, and the fix if it is known."""
    if full := cannot_write(error, where):
        return full
    fix = next((fixes[error.errno] for fixes in (_LASTING, _PASSING, _IN_THE_WAY) if error.errno in fixes), None)
    file = _file_of(error) or where
    if isinstance(error, FileNotFoundError) and os.path.islink(str(file)):
        return f"{file}: a link to {os.readlink(str(file))}, which does not exist; is its disk mounted?"
    reason = error.strerror or str(error)
    if error.errno and re.search(_ARROW, reason):
        reason = os.strerror(error.errno)
    line = f"{file or 'a file'}: {reason}"
    return f"{line}; {fix}." if fix else f"{line}."


_ARROW = r"Failed to open local file '(.*?)'"
"""The name of the file in pyarrow's errors, which have no `filename`."""


def _file_of(error: BaseException) -> object:
    opened = re.search(_ARROW, str(error))
    return getattr(error, "filename2", None) or getattr(error, "filename", None) or (opened and opened[1])


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable's name or value looks like a credential."""
    return bool(re.search(_SECRET_NAME, name)) or redact(value, {}) != value


def redact(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return `text` with everything that looks like a credential replaced by `***`.

    This covers the known token formats, passwords and tokens in URLs, signed URLs, headers, assignments to names that
    mark a secret, and the value of every environment variable with such a name, so that `command.txt`, logs and our own
    messages can be shared.
    """
    for name, value in environ.items():
        if re.search(_SECRET_NAME, name) and len(value) >= 8:
            text = text.replace(value, "***")
    text = re.sub(_SECRET_PART, lambda found: f"{next(filter(None, found.groups()))}***", text)
    return re.sub(_ASSIGNMENT, _assigned, re.sub(_SECRET_VALUE, "***", text))


def redacted(value: object, key: str = "") -> Any:
    """Return a JSON value without credentials in its texts or under keys for credentials, safe to share."""
    secret = bool(re.fullmatch(_SECRET_KEY, key))
    if isinstance(value, Mapping):  # below a key for credentials, every text is one
        return {redact(str(name)): redacted(inside, key if secret else str(name)) for name, inside in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(inside, key) for inside in value]
    if not isinstance(value, str) or not value:
        return value
    return "***" if secret else redact(value)


def check_no_credential(value: Mapping[str, object], where: str, prefix: str = "") -> None:
    """Refuse nested settings that contain a credential where others could read it.

    `where` is the place for the message, such as `in the job's files`, and `prefix` begins the keys in it.
    """
    for key, inside in value.items():
        if isinstance(inside, Mapping):
            check_no_credential(inside, where, f"{prefix}{key}.")
        elif redacted(inside, key) != inside:
            raise UserError(
                f"{prefix}{key}={redacted(inside, key)}: its credential could be read {where}; leave it out, and use "
                "an address or a file that needs none."
            )


def _assigned(found: re.Match[str]) -> str:
    """Return an assignment without its value if its name marks a secret; `pad_token=...` does not."""
    marks = re.search(_SECRET_NAME, found[1] if found[1].isupper() else re.sub("token|header", "", found[1]))
    return f"{found[1]}=***" if marks else found[0]


def printable(text: object) -> str:
    """Return text with terminal control sequences and invalid characters escaped; line breaks and tabs stay.

    The joiners of emoji, Persian and Indian scripts (U+200C, U+200D) stay too.
    """
    kept = "\n\t\u200c\u200d"
    return "".join(
        one
        if one.isprintable() or one in kept or (one.isspace() and ord(one) > 0x9F)
        else one.encode("unicode_escape").decode()
        for one in str(text)
    )
