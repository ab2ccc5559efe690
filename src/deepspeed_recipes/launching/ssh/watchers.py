"""Watches a run's ranks on other hosts over ssh, and supervises the launcher that has started them."""

import contextlib
import json
import select
import signal
import subprocess
from collections.abc import Mapping

from ...recipe.run_folder import RunFolder
from ..supervise import FailedRank, Outcome, supervise
from .hostfile import HostPool
from .remote import NO_CONNECTION, SSH, launcher_environment, module_command, signal_ranks

ALIVE = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3", "-o", "ControlPath=none")
"""A host that does not answer for 15 to 20 s is lost. A connection shared with other logins would not detect it."""
CLOSE_TIMEOUT = 5
"""Seconds within which a host must end its watcher."""


def supervise_hosts(pool: HostPool, folder: RunFolder, command: list[str], environment: Mapping[str, str]) -> Outcome:
    """Run DeepSpeed's launcher for a pool and return how it ended; no rank outlives it on any host."""
    launcher = launcher_environment(folder, environment)
    # No rank is a child process here, not even on this machine: pdsh starts them all through ssh.
    outcome = supervise(command, launcher, folder, pool.ranks, lambda _: RemoteWatcher(pool, folder))
    if outcome.status:
        signal_ranks(pool, folder, signal.SIGKILL)  # pdsh ends its ssh, which ends no process on the host
    return outcome


class RemoteWatcher:
    """Watches the ranks on all hosts of a pool, through one process on each host.

    That process reports the ranks that fail, and kills them if it no longer receives data from here.
    """

    def __init__(self, pool: HostPool, folder: RunFolder) -> None:
        """Start the processes."""
        self.pool = pool
        self.folder = folder
        self.poll = select.poll()
        self.hosts: dict[int, HostWatch] = {}  # by the descriptor of the process's output
        for host, slots in pool.slots.items():
            command = module_command("deepspeed_recipes.launching.ranks", "watch", str(len(slots)), str(folder.path))
            watch = HostWatch(host, command)
            self.hosts[watch.output.fileno()] = watch
            self.poll.register(watch.output, select.POLLIN)

    def signal(self, number: int) -> None:
        """Send a signal to the ranks on all hosts."""
        signal_ranks(self.pool, self.folder, number)

    def failed(self, seconds: float) -> list[FailedRank]:
        """Wait at most that long, and return the ranks that have failed and the hosts that were lost meanwhile."""
        for watch in self.hosts.values():
            with contextlib.suppress(BrokenPipeError):
                watch.input.write(b"\n")
        found = []
        for descriptor, _ in self.poll.poll(1000 * seconds):
            watch = self.hosts[descriptor]
            line = watch.output.readline()
            if not line:
                self.poll.unregister(descriptor)
                if watch.process.wait() == NO_CONNECTION:
                    found.append(FailedRank(None, None, watch.host))
            elif line.startswith(b"{"):  # a login may print a greeting first
                found.append(FailedRank(host=watch.host, **json.loads(line)))
        return found

    def close(self) -> None:
        """End the processes, and with them the remaining ranks."""
        for watch in self.hosts.values():
            watch.input.close()
        for watch in self.hosts.values():
            watch.wait()


class HostWatch:
    """The process that watches the ranks of one host, and its two pipes."""

    def __init__(self, host: str, command: str) -> None:
        """Start `command` on the host."""
        self.host = host
        self.process = subprocess.Popen(
            [*SSH, *ALIVE, host, command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        assert self.process.stdin and self.process.stdout  # for types: both are pipes
        self.input, self.output = self.process.stdin, self.process.stdout

    def wait(self) -> None:
        """Wait for the end of the process, which ends because its input is closed."""
        try:
            self.process.wait(CLOSE_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.output.close()
