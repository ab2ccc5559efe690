"""A server as a process: started, waited for until it answers, and ended with everything that it has started."""

import contextlib
import json
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from ...machine import children
from ...recipe.errors import UserError
from .engines import Engine

START = 1800
"""Seconds in which a server must answer: vLLM compiles, and reads large weights from slow disks."""
GRACE = 20
"""Seconds between asking a server to end and ending it."""


def check_port(host: str, port: int) -> None:
    """Refuse an address that cannot be used.

    Raises:
        UserError: another process has the port, or this machine has no such address.
    """
    if not 0 < port < 65536:
        raise UserError(f"--port {port}: must be between 1 and 65535.")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError, TypeError) as error:
            raise UserError(f"--host {host} --port {port}: {error}; choose another with --host or --port N.") from None


@contextlib.contextmanager
def running(engine: Engine, model: str, host: str, port: int, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a server and yield once its model answers; end it, and the processes that it has started, at the end.

    They also end, and leave no file behind, when this process is killed.

    Args:
        engine: what to start.
        model: what requests call the model.
        host: where it listens.
        port: where it listens.
        log: gets what it prints.

    Raises:
        UserError: it ends, does not answer within `START` seconds, or its model cannot answer.
    """
    with children.scratch("ds-recipes-serve-") as place, log.open("wb") as out:
        options = {"env": {**engine.variables, "TMPDIR": str(place)}, "cwd": engine.start_in}  # vLLM leaves sockets
        with children.running(engine.command, stdout=out, stderr=subprocess.STDOUT, **options) as process:
            _wait(process, engine, address(host, port), log)
            _ask(model, engine, address(host, port), log)
            try:
                yield process
            finally:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)


def address(host: str, port: int) -> str:
    """Return where a client on this machine reaches a server."""
    return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"


def _wait(process: "subprocess.Popen[bytes]", engine: Engine, url: str, log: Path) -> None:
    until = time.monotonic() + START
    while time.monotonic() < until:
        if process.poll() is not None:
            why = f"{engine.title} ended with status {process.returncode}: {_reason(log)}"
            raise UserError(f"{why}; --log FILE keeps what it prints.")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise UserError(f"{engine.title} does not answer after {START} s; --log FILE keeps what it prints.")


def _ask(model: str, engine: Engine, url: str, log: Path) -> None:
    """Have the model write one token: a server can be healthy while none of its kernels fits the weights."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        urllib.request.urlopen(request, timeout=START).close()
    except urllib.error.HTTPError as error:
        if error.code >= 500:
            why = f"{engine.title} fails at its first answer: {_reason(log)}"
            raise UserError(f"{why}; --log FILE keeps what it prints.") from None
    except OSError as error:
        raise UserError(f"{engine.title} gives no first answer ({error}): {_reason(log)}.") from None


def _reason(log: Path) -> str:
    """Return the line of a log that says what is wrong: the first error, since what follows it are its consequences."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = (re.search(r"\b\w*Error: .+", line) for line in lines if "WARNING" not in line)
    told = next((found[0] for found in errors if found), None) or (lines or ["it printed nothing"])[-1]
    return told[:300]
