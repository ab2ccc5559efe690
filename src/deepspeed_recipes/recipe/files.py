"""Replaces files only once they are complete, whatever ends the process, and lists folders without skipping any.

Reading always ends: a pipe without a writer and a device such as /dev/zero are refused.
"""

import contextlib
import errno
import math
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .errors import UserError, of_system

Json = dict[str, Any]
"""A JSON object."""
JsonView = Mapping[str, Any]
"""A JSON object that is only read."""
NEVER = 2147483647
"""Stands for infinity, which strict JSON lacks, as for the Trainer's `steps_per_print`; no run reaches this number."""


def unique(pairs: list[tuple[str, Any]]) -> Json:
    """Return a JSON object, for `object_pairs_hook`; raises a ValueError if a key is there twice: one would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} twice in an object")
    return found


def finite(value: object) -> Any:
    """Return JSON-like values with `NEVER` in place of infinity."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return NEVER if isinstance(value, float) and math.isinf(value) else value


def text_of(config: JsonView) -> JsonView:
    """Return the part of a config.json that describes the text model: `text_config`, or the whole without one."""
    return config.get("text_config") or config


def without_attention(config: JsonView) -> Json:
    """Return a config.json without the attention implementations that it names, also in its parts.

    `model.attention` chooses one. A base often names what its trainer had, such as a FlashAttention not installed here.
    """
    return {
        name: without_attention(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in ("attn_implementation", "_attn_implementation")
    }


def check_ends(path: str | os.PathLike[str]) -> None:
    """Refuse a file whose content may never end or never come: a named pipe, or a device such as /dev/zero.

    A shell's `<(...)`, /dev/stdin, a terminal and /dev/null are accepted.
    """
    try:
        held = os.stat(path)
    except (OSError, ValueError):  # the caller that opens the file reports the error
        return
    pipe = stat.S_ISFIFO(held.st_mode) and not os.path.realpath(path).startswith("/proc/")
    device = stat.S_ISCHR(held.st_mode) and os.major(held.st_rdev) == 1 and Path(path).name != "null"
    if pipe or device:
        raise UserError(f"{path}: a {'named pipe' if pipe else 'device'}, not a file; name a file.")


def check_name(option: str, path: Path) -> None:
    """Refuse a name with a line break, which would be a line of scripts, logs and printed commands, or one like it."""
    if not str(path).isprintable():
        raise UserError(f"{option} {str(path)!r}: control characters, or not UTF-8; choose another name.")


def check_writable(option: str, path: Path, folder: bool = False) -> None:
    """Refuse, before the work begins, a file or folder that could not be written after it; leaves nothing behind.

    `path` is a file, whose folder may be new, or with `folder` a folder, new or not. `option` names it on the command
    line.
    """
    check_name(option, path)
    try:
        place = Path(os.path.realpath(path))
        if not folder and place.exists() and not (place.is_file() or place.is_dir()):  # /dev/null
            return
        if place.exists() and place.is_dir() != folder:
            wanted = "a file, not a folder; name a folder" if folder else "a folder, not a file; name a file"
            raise UserError(f"{option} {path}: {wanted}.")
        nearest = next(one for one in ([place] if folder else []) + [*place.parents] if os.path.lexists(one))
        if nearest.is_symlink():
            raise UserError(f"{option} {path}: a broken link; remove it, or choose another path.")
        import tempfile  # which imports much, and a plan writes nothing

        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        error.filename = error.filename2 = None  # a file that is not the user's
        raise UserError(f"{option} {of_system(error, path)}") from error


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, as UTF-8 and with unchanged line ends."""
    write_bytes(path, text.encode("utf-8"))


_NAMED_ONLY = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS, errno.EXDEV, errno.ENOENT)
"""Errors of file systems without files that have no name, such as NFS, and of systems without /proc."""


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically, and its folders: whatever ends this process, it has its old or its new content.

    The content is written to a file without a name, which disappears with the process, and then replaces the old file.
    A link stays a link, and its target is replaced; the old file's mode and, if possible, its owner are kept. A device
    or a pipe is written itself: /dev/null must not be replaced. An OSError names `path`, which is then unchanged.
    """
    target = Path(os.path.realpath(path))
    draft = target.parent / f".{target.name[:50]}.{os.urandom(4).hex()}.part"
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if target.is_symlink():  # `realpath` leaves a link only if links form a circle
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        old = target.stat() if target.exists() else None
        if old and not stat.S_ISREG(old.st_mode):
            target.write_bytes(content)
            return
        try:
            _write_draft(target.parent, getattr(os, "O_TMPFILE", 0), draft, content, old)  # 0: EISDIR
        except OSError as error:
            if error.errno not in _NAMED_ONLY:
                raise
            _write_draft(draft, os.O_CREAT | os.O_EXCL, draft, content, old)
        draft.replace(target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        # The names of the draft and of its folder would mean nothing to the user.
        if isinstance(error, OSError) and error.filename in (None, str(draft), str(target.parent)):
            error.filename, error.filename2 = str(path), None
        raise


def _write_draft(place: Path, flags: int, draft: Path, content: bytes, old: os.stat_result | None) -> None:
    """Write a file at `place`, with the owner and mode of `old`, to the disk, and give it the name `draft`."""
    with open(os.open(place, os.O_WRONLY | flags, 0o666), "wb") as written:
        written.write(content)
        written.flush()
        if old:
            with contextlib.suppress(PermissionError):
                os.fchown(written.fileno(), old.st_uid, old.st_gid)
            os.fchmod(written.fileno(), stat.S_IMODE(old.st_mode))
        os.fsync(written.fileno())
        if place != draft:  # with `src_dir_fd`, which is unused, Python follows the link in /proc
            os.link(f"/proc/self/fd/{written.fileno()}", draft, src_dir_fd=written.fileno(), follow_symlinks=True)


def below(folder: Path) -> Iterator[str]:
    """Yield the paths of all files in a folder and its subfolders; OSError where `Path.rglob` would skip a folder."""

    def refuse(error: OSError) -> None:
        raise error

    for place, _, names in os.walk(folder, onerror=refuse):
        yield from (os.path.join(place, name) for name in names)
