"""Runs commands on other hosts over ssh, sends signals to a run's ranks, and detects which hosts answer."""

import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ...recipe.project import IMPORT_ROOT, python_path
from ...recipe.run_folder import RunFolder
from .hostfile import HostPool, with_slots

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
"""With BatchMode a host that requires a password counts as unreachable, as it is for pdsh."""
NO_CONNECTION = 255
"""Exit status of ssh without a connection, or after losing it."""
NO_CHECKOUT, NO_PYTHON = 91, 92
"""Exit statuses of `module_command` if a host lacks the checkout or its Python."""
SSH_TIMEOUT = 60
"""Seconds for one command; the first start of Python from a cold network file system can take most of them."""


def module_command(name: str, *arguments: str) -> str:
    """Return a shell command that runs a module of this checkout with the Python of this process.

    It exits with NO_CHECKOUT or NO_PYTHON if the host does not have them at the same path.
    """
    root, python = shlex.quote(str(IMPORT_ROOT)), shlex.quote(sys.executable)
    found = f"cd {root} 2>/dev/null || exit {NO_CHECKOUT}; test -x {python} || exit {NO_PYTHON}; "
    path = [f"{variable}={value}" for variable, value in python_path({}).items()]
    return found + shlex.join(["exec", "env", *path, sys.executable, "-m", name, *arguments])


def run_on_each(hosts: tuple[str, ...], command: Callable[[str], str]) -> list[subprocess.CompletedProcess[str]]:
    """Run `command(host)` on all hosts at the same time, and return the results in their order."""

    def run_on(host: str) -> subprocess.CompletedProcess[str]:
        line = [*SSH, host, command(host)]
        try:
            return subprocess.run(line, capture_output=True, text=True, timeout=SSH_TIMEOUT, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(line, NO_CONNECTION, "", f"no answer within {SSH_TIMEOUT} s")

    with ThreadPoolExecutor(min(64, len(hosts))) as pool:
        return list(pool.map(run_on, hosts))


def signal_ranks(pool: HostPool, folder: RunFolder, number: int) -> list[subprocess.CompletedProcess[str]]:
    """Send a signal to the run's ranks on every host; SIGKILL also kills the launchers above them."""
    command = module_command("deepspeed_recipes.launching.ranks", "signal", str(number), str(folder.path))
    return run_on_each(pool.hosts, lambda _: command)


def reachable(pool: HostPool, folder: RunFolder) -> HostPool:
    """Return the pool without the hosts that do not answer; on the others, kill the run's remaining processes."""
    answers = signal_ranks(pool, folder, signal.SIGKILL)
    alive = [host for host, answer in zip(pool.hosts, answers, strict=True) if answer.returncode == 0]
    return with_slots(pool, {host: pool.slots[host] for host in alive})
