"""A Ray cluster of two nodes on this machine: real head and worker, ended by their process groups."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from deepspeed_recipes.launching.ray.cluster import environment
from tests.network_hosts import answers
from tests.ranks import free_port

QUIET = {"RAY_AUTH_MODE": "disabled"}
"""Ray would otherwise leave a token in the home folder."""
TRIES = 10
"""Ray waits half a minute for each of its parts to start, which on a loaded machine is too short (_private/node.py)."""


def without_ray() -> str:
    """Return why Ray cannot run here; empty if it can."""
    return "" if importlib.util.find_spec("ray") else "no Ray (make ray)"


def variables() -> dict[str, str]:
    """Return the environment of all that uses the cluster."""
    return environment(os.environ | QUIET)


class RayNodes:
    """A head and more nodes; what comes before a node's command is `inside`, such as `ip netns exec`."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ray"))  # short: Unix sockets have 107 characters
        self.host, self.port = address, free_port()
        self.processes: list[subprocess.Popen] = []

    def __enter__(self) -> "RayNodes":
        return self

    @property
    def address(self) -> str:
        """What `--address` takes."""
        return f"{self.host}:{self.port}"

    def add(self, cpus: int = 1, inside: tuple[str, ...] = (), ip: str | None = None) -> subprocess.Popen:
        """Start a node, the head first, and wait until the cluster has it."""
        head = not self.processes
        where = ["--head", "--port", str(self.port), "--include-dashboard=false", "--temp-dir", str(self.folder)]
        where = where if head else ["--address", self.address]
        where += ["--node-ip-address", ip or self.host, "--object-store-memory", str(80 * 2**20)]
        command = [*inside, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", str(cpus)]
        for _ in range(TRIES):
            process = self._started([*command, *where], head)
            if process:
                self.processes.append(process)
                return process
        raise AssertionError("Ray did not start")

    def _started(self, command: list[str], head: bool) -> subprocess.Popen | None:
        """Start a node and wait until the cluster has it; None: Ray itself has given up waiting."""
        log = self.folder / f"node{len(self.processes)}.log"
        with log.open("w") as file:
            process = subprocess.Popen(command, env=variables(), stdout=file, stderr=file, start_new_session=True)
        while "Ray runtime started" not in log.read_text() or (head and not answers(self.host, self.port)):
            if process.poll() is not None:
                assert "timed out during startup" in log.read_text(), log.read_text()
                return None
            time.sleep(0.2)
        return process

    def kill(self, process: subprocess.Popen) -> None:
        """End a node without notice, with all that runs on it."""
        for one in [*_below(process.pid), process.pid]:
            try:
                os.kill(one, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()

    def __exit__(self, *error: object) -> None:
        for process in reversed(self.processes):
            if process.poll() is None:
                self.kill(process)
        shutil.rmtree(self.folder, ignore_errors=True)


def _below(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]
