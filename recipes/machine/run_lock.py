"""One writer per run folder: a lock that names its holder and that a dead process cannot hold.

The run folder may be on a shared file system, where locks of the operating system are unreliable. The lock is a file,
made with a hard link, which is atomic there too. Its holder touches it every few seconds.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..spec.errors import UserError

NAME = "writer.json"
BEAT = 5
"""Seconds between two heartbeats."""
SILENT = 60
"""Seconds without a heartbeat after which a process on another host is dead; network file systems cache times."""


def check(folder: Path) -> None:
    """Refuse a run folder that a living process writes to.

    Raises:
        UserError: names the process and its host.
    """
    holder = _read(folder / NAME)
    if holder and _lives(folder / NAME, holder):
        raise UserError(
            f"{folder}: this run is being written by process {holder['pid']} on {holder['host']}; wait until it ends, "
            f"or stop it (kill {holder['pid']}) before you resume."
        )


@contextlib.contextmanager
def hold(folder: Path, wait: float = 0.0) -> Iterator[None]:
    """Be the folder's only writer during a `with` block.

    Args:
        folder: the run's; made if it does not exist.
        wait: seconds that the last writer gets to end or to be found dead.

    Raises:
        UserError: another process writes to it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    deadline, ended = time.monotonic() + wait, threading.Event()
    try:
        while not _taken(folder):
            if time.monotonic() >= deadline:
                check(folder)
            time.sleep(0.2)
        threading.Thread(target=_beat, args=(folder / NAME, ended), daemon=True).start()
        yield
    finally:
        ended.set()
        if _read(folder / NAME) == _self():
            (folder / NAME).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # nothing has been written
            folder.rmdir()


def _taken(folder: Path) -> bool:
    """Try to take the lock once; a dead holder's is removed."""
    lock, own = folder / NAME, folder / f".{NAME}.{socket.gethostname()}.{os.getpid()}"
    try:
        own.write_text(json.dumps(_self()), encoding="utf-8")
        with contextlib.suppress(FileExistsError):
            os.link(own, lock)
            return True
        holder = _read(lock)
        if holder is None or _lives(lock, holder):
            return False
        # Two processes may have found it dead: what each moves away may be the other's new lock, and is put back.
        moved = own.with_suffix(".dead")
        with contextlib.suppress(FileNotFoundError):
            lock.rename(moved)
            if _read(moved) != holder:
                os.link(moved, lock)
            moved.unlink()
        return False
    finally:
        own.unlink(missing_ok=True)


def _self() -> dict[str, Any]:
    return {"host": socket.gethostname(), "boot": _boot(), "pid": os.getpid(), "started": _started(os.getpid())}


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


def _started(pid: int) -> int | None:
    """Return when a process started, in clock ticks after the boot; None: it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state == "Z" else int(fields[18])


def _read(lock: Path) -> dict[str, Any] | None:
    try:
        return json.loads(lock.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _lives(lock: Path, holder: dict[str, Any]) -> bool:
    """Return whether a lock's holder is alive; on other hosts, whether its heart has beaten lately."""
    if (holder["host"], holder["boot"]) == (socket.gethostname(), _boot()):
        return _started(holder["pid"]) == holder["started"]
    now = lock.with_name(f".{NAME}.clock.{socket.gethostname()}.{os.getpid()}")  # the file system's clock, not ours
    try:
        now.touch()
        return now.stat().st_mtime - lock.stat().st_mtime < SILENT
    except FileNotFoundError:
        return False
    finally:
        now.unlink(missing_ok=True)


def _beat(lock: Path, ended: threading.Event) -> None:
    while not ended.wait(BEAT):
        with contextlib.suppress(OSError):
            os.utime(lock)
