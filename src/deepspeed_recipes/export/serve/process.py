"""Runs a server as a process: starts it, waits until it answers, and ends it with all its child processes."""

import contextlib
import json
import re
import signal
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
"""Seconds within which a server must answer: vLLM compiles, and reads large weights from slow disks."""
GRACE = 20
"""Seconds between SIGTERM and SIGKILL for a server."""


@contextlib.contextmanager
def running(engine: Engine, model: str, host: str, port: int, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a server, yield once its model answers, and finally end the server and its child processes.

    They also end, and leave no file behind, when this process is killed. `model` is its name in requests.
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
    """Return a server's address for a client on this machine."""
    return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"


def _wait(process: "subprocess.Popen[bytes]", engine: Engine, url: str, log: Path) -> None:
    until = time.monotonic() + START
    while time.monotonic() < until:
        if process.poll() is not None:
            if process.returncode == -signal.SIGKILL:
                raise UserError(
                    f"{engine.title} was killed, as Linux does if memory runs out: ds-recipes plan MODEL --serve 1x8k "
                    "prints what it needs; serve a quantised copy, or split it over GPUs (--tensor-parallel)."
                )
            why = f"{engine.title} ended with status {process.returncode}: {_reason(log)}"
            if "support LoRA" in why or "expected target modules" in why:  # vLLM, of BLOOM and GLM 4
                raise UserError(f"{why} Merge the adapter (ds-recipes export --merge), or use --engine transformers.")
            raise UserError(f"{why}; --log FILE keeps its output.")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise UserError(f"{engine.title} does not answer after {START} s; --log FILE keeps its output.")


def _ask(model: str, engine: Engine, url: str, log: Path) -> None:
    """Request one token from the model: a server can be healthy although none of its kernels supports the weights."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        urllib.request.urlopen(request, timeout=START).close()
    except urllib.error.HTTPError as error:
        if error.code >= 500:
            why = f"{engine.title} fails at its first answer: {_reason(log)}"
            raise UserError(f"{why}; --log FILE keeps its output.") from None
    except OSError as error:
        raise UserError(f"{engine.title} gives no first answer ({error}): {_reason(log)}.") from None


def _reason(log: Path) -> str:
    """Return the first error in a log, since later errors are its consequences, or the last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    found = [one[0] for line in lines if "WARNING" not in line and (one := re.search(r"\b\w*Error: .+", line))]
    if found and found[0].startswith("CalledProcessError"):  # vLLM prints later why its process has failed
        found.sort(key=lambda one: not one.startswith("ModuleNotFoundError"))
    reason = next(iter(found), None) or (lines or ["no output"])[-1]
    return reason[:300]
