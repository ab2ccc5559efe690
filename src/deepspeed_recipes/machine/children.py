"""Child processes and scratch folders that end with this process, even if SIGKILL ends it."""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def _at_death(script: str, *words: str) -> Iterator[None]:
    """Run a shell script as soon as this process dies, during a `with` block.

    A shell in its own session waits until a pipe closes whose other end only this process holds. The children cannot do
    this themselves: most do not watch their parent, and a child that hangs in a library cannot.
    """
    shell = subprocess.Popen(
        ["/bin/sh", "-c", f"read -r _; {script}", "sh", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )
    try:
        yield
    finally:
        shell.kill()
        shell.communicate()


def killed_with_this_process(group: int) -> contextlib.AbstractContextManager[None]:
    """Return a context in which a process group is killed as soon as this process dies."""
    return _at_death(f"kill -s KILL -- -{group}")


@contextlib.contextmanager
def running(command: Sequence[str], **options: Any) -> Iterator["subprocess.Popen[Any]"]:
    """Start a command in its own session, and kill that session when the block ends or this process dies.

    The child waits for a line from this process before it becomes the command, so that the command never runs before
    the shell that would kill it. A command that does not exist ends with status 127.
    """
    gate, opened = os.pipe()
    waiting = ["/bin/sh", "-c", f'read -r _ </dev/fd/{gate} && exec "$@"', "sh", *command]
    try:
        process = subprocess.Popen(waiting, pass_fds=[gate], start_new_session=True, **options)
        try:
            with killed_with_this_process(process.pid):
                os.write(opened, b"\n")
                yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    finally:
        os.close(gate)
        os.close(opened)


def run(command: Sequence[str], timeout: float | None = None, **options: object) -> "subprocess.CompletedProcess[Any]":
    """Run a command like `subprocess.run`; it and all that it starts end with this call or with this process."""
    with running(command, **options) as process:
        out, error = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(command, process.returncode, out, error)


@contextlib.contextmanager
def scratch(prefix: str = "ds-recipes-", inside: Path | None = None) -> Iterator[Path]:
    """Yield a new folder, temporary or `inside` another, that is removed when the block or this process ends."""
    place = Path(inside or tempfile.gettempdir(), f"{prefix}{secrets.token_hex(8)}").absolute()
    # Before the folder is made and until it is gone: a kill in between would leave it. Processes that are killed at the
    # same moment may still write into it.
    with _at_death('for _ in 1 2 3 4 5; do sleep 0.2; rm -rf -- "$1"; done', str(place)):
        place.mkdir(mode=0o700)
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)
