"""One writer per run folder: a lock that names its holder and that is free once its holder is dead.

The run folder may be on a shared file system, where the operating system's locks, on which `filelock` builds, are
unreliable: NFS silently takes them away from a host that does not respond. This lock is a file that is created as a
hard link, which is atomic on such file systems too. Its holder touches the file every few seconds. A holder whose host
was suspended for longer may have lost the lock, so it checks before it writes, and exits if it has.
"""

import contextlib
import errno
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from ..recipe.errors import UserError
from ..recipe.files import Json

NAME = "writer.json"
BEAT = 5
"""Seconds between two heartbeats."""
SILENT = 60
"""Seconds without a heartbeat after which another host's process counts as dead; network file systems cache times."""
LISTENED = 3 * BEAT
"""Seconds for which a silent process is watched before its lock is taken, since clocks of hosts may differ."""

_ENDING = threading.Lock()


class Lock:
    """A run folder's lock, with its holder at the time when this process began to write."""

    def __init__(self, folder: Path, holder: Json | None) -> None:
        """`holder`: the process that holds the lock, or None without a lock, as in tests that start ranks."""
        self.folder = folder
        self.holder = holder

    def check(self) -> None:
        """End this process at once, and with it the ranks that it watches, if another writer now holds the lock."""
        try:
            now = _read(self.folder / NAME)
        except OSError:  # a folder that cannot be read cannot be written either
            return
        if self.holder and now and now != self.holder:
            _ENDING.acquire()  # the heartbeat and the main thread may both get here
            print(
                f"{self.folder}: this run was silent for a minute, and process {now.get('pid')} on {now.get('host')} "
                "has taken it over; ending, so that only one writes.",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)


def found(folder: Path) -> Lock:
    """Return the lock with its current holder, so that ranks can check that their launcher still holds it."""
    return Lock(folder, _read(folder / NAME))


def check(folder: Path) -> None:
    """Refuse a run folder that a living process writes to, which the message names."""
    holder = _read(folder / NAME)
    if holder is not None and _lives(folder / NAME, holder):
        pid, host = holder.get("pid"), holder.get("host")
        who = f"process {pid} on {host}" if pid else f"a process that {NAME} does not name"
        how = f" (kill {pid})" if pid else ""
        raise UserError(f"{folder}: this run is being written by {who}; wait until it ends, or stop it{how} first.")


@contextlib.contextmanager
def hold(folder: Path, wait: float = 0.0) -> Iterator[Lock]:
    """Be the only writer of the folder, created if it does not exist, during a `with` block.

    A previous writer has `wait` seconds to end or to count as dead.
    """
    folder.mkdir(parents=True, exist_ok=True)
    deadline, ended = time.monotonic() + wait, threading.Event()
    lock, before = Lock(folder, _self()), None
    while not _taken(folder):
        if time.monotonic() >= deadline:
            check(folder)
        time.sleep(0.2)
    try:
        threading.Thread(target=_beat, args=(lock, ended), daemon=True).start()
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGCONT, lambda number, frame: lock.check())  # before this thread writes
        yield lock
    finally:
        ended.set()
        if before is not None:
            signal.signal(signal.SIGCONT, before)
        with contextlib.suppress(OSError):
            if _read(folder / NAME) == lock.holder:
                (folder / NAME).unlink(missing_ok=True)
            folder.rmdir()  # fails unless the folder is empty


def _taken(folder: Path) -> bool:
    """Try once to take the lock; a dead holder's lock is removed."""
    lock, own = folder / NAME, folder / f".{NAME}.{socket.gethostname()}.{os.getpid()}"
    try:
        own.write_text(json.dumps(_self()), encoding="utf-8")
        with contextlib.suppress(FileExistsError):
            _link(own, lock)
            return True
        holder = _read(lock)
        if holder is None or _lives(lock, holder):
            return False
        # Two processes may have found the holder dead: a moved file may be the other's new lock, which is put back.
        moved = own.with_suffix(".dead")
        with contextlib.suppress(FileNotFoundError):
            lock.rename(moved)
            if _read(moved) != holder:
                _link(moved, lock)
            moved.unlink()
        return False
    finally:
        own.unlink(missing_ok=True)


def _link(file: Path, lock: Path) -> None:
    """Link a file to the lock's name, unless the lock exists."""
    try:
        os.link(file, lock)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        # No hard links, as in a mounted bucket: the lock is empty for a moment, and an empty lock counts as held.
        with lock.open("x", encoding="utf-8") as opened:
            opened.write(file.read_text(encoding="utf-8"))


def _self() -> Json:
    return {
        "host": socket.gethostname(),
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip(),
        "processes": os.readlink("/proc/self/ns/pid"),  # containers may share a host's name, but not process ids
        "pid": os.getpid(),
        "started": _started(os.getpid()),
    }


def _started(pid: int) -> int | None:
    """Return the time when a process started, in clock ticks after the boot, or None if the process has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state == "Z" else int(fields[18])


def _read(lock: Path) -> Json | None:
    """Return the record of a lock's holder, an empty one if the file is incomplete, or None without a lock."""
    try:
        held = json.loads(lock.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return held if isinstance(held, dict) else {}


def _lives(lock: Path, holder: Json) -> bool:
    """Return whether a lock's holder is alive; on another host, whether it touched the lock recently or does now."""
    own = _self()
    if all(holder.get(key) == own[key] for key in ("host", "boot", "processes")) and isinstance(holder.get("pid"), int):
        began = _started(holder["pid"])
        return began is not None and began == holder.get("started")
    try:
        beaten = _beaten(lock)
        # The time by the file system's clock, which may differ from this host's.
        with tempfile.NamedTemporaryFile(prefix=f".{NAME}.clock.", dir=lock.parent) as clock:
            now = os.fstat(clock.fileno()).st_mtime
        if holder and 0 <= now - beaten < SILENT:
            return True
        # Silent, dated in the future, or not written by this project: watch for a heartbeat.
        until = time.monotonic() + LISTENED
        while time.monotonic() < until:
            time.sleep(0.1)
            if _beaten(lock) != beaten:
                return True
    except FileNotFoundError:
        pass
    return False


def _beaten(lock: Path) -> float:
    with lock.open("rb") as opened:  # a network file system may report an old time until the file is opened
        return os.fstat(opened.fileno()).st_mtime


def _beat(lock: Lock, ended: threading.Event) -> None:
    while not ended.wait(BEAT):
        with contextlib.suppress(OSError):
            lock.check()
            os.utime(lock.folder / NAME)
