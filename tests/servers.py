"""ds-recipes serve as a user starts it, and what needs the second environment."""

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deepspeed_recipes.export.serve import environment
from tests import ROOT
from tests.ranks import free_port

NO_SERVING = pytest.mark.skipif(environment.python("vllm") is None, reason="needs the environment of `make serving`")


@contextlib.contextmanager
def serving(*words: object, folder: Path | None = None) -> Iterator[str]:
    """Start ds-recipes serve in `folder`, yield its address once it is ready, and end it as Ctrl-C does."""
    port = free_port()
    command = [sys.executable, str(ROOT / "scripts" / "serve.py"), *map(str, words), "--port", str(port)]
    running = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said: list[str] = []
    try:
        for line in running.stdout or ():
            said.append(line)
            if line.startswith("ready:"):
                yield f"http://127.0.0.1:{port}"
                break
    finally:
        running.send_signal(signal.SIGINT)
        status = running.wait(60)
        running.stdout.close()
    assert said[-1:] and said[-1].startswith("ready:") and status == 0, "".join(said)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "the server outlives the command"


def eventually(holds: Callable[[], bool], seconds: float = 10) -> None:
    """Wait until something holds, and fail if it does not within so many seconds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)
