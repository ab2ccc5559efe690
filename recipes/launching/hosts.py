"""Several hosts over ssh: the hostfile, what is said to DeepSpeed's launcher about it, and signals to their ranks.

The file is DeepSpeed's (`name slots=N` per line), and so are `--include` and `--exclude`: `host1@host2:0,2`.
"""

import contextlib
import json
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.launching import variables
from recipes.launching.causes import Fallen
from recipes.launching.supervise import Ended, supervise
from recipes.spec.errors import UserError, is_secret
from recipes.spec.pages import ROOT
from recipes.spec.run_folder import RunFolder

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
"""BatchMode: a host that wants a password counts as unreachable, as it would be for pdsh."""
ALIVE = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3", "-o", "ControlPath=none")
"""A host that answers nothing for 15 to 20 s is lost. A connection shared with other logins would not notice."""
LOST = 255
"""Exit status of ssh when there is no connection, or none any more."""
WATCHER_TIMEOUT = 5
"""Seconds that a host gets to end its watcher."""
SSH_TIMEOUT = 60
"""Seconds for one command on a host: a first Python start from a cold network file system takes tens of them."""


@dataclass(frozen=True)
class Pool:
    """The hosts of a run, and the slots (GPUs, or CPU ranks) that it takes of each."""

    slots: Mapping[str, tuple[int, ...]]
    """In the hostfile's order, which is the order of the ranks."""
    hostfile: Path
    options: tuple[str, ...] = ()
    """What DeepSpeed's launcher is told beside the file."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names."""
        return tuple(self.slots)

    @property
    def ranks(self) -> int:
        """The world size."""
        return sum(map(len, self.slots.values()))

    @property
    def widest(self) -> int:
        """The most ranks that a host gets."""
        return max(map(len, self.slots.values()))


def read(
    hostfile: Path, include: str = "", exclude: str = "", nodes: int | None = None, gpus: int | None = None
) -> Pool:
    """Return what is left of a hostfile's hosts, by the rules of DeepSpeed's launcher.

    Raises:
        UserError: the file is missing, empty, or has a line that DeepSpeed would misread; a filter that names what is
            not there; more nodes or GPUs than there are.
    """
    slots = parse(hostfile)
    if (include or exclude) and (nodes or gpus):
        raise UserError("--include and --exclude name hosts and slots by themselves; leave out --nodes and --gpus.")
    if include and exclude:
        raise UserError("--include and --exclude: one of them, not both.")
    options: tuple[str, ...] = ()
    if include or exclude:
        slots = _filtered(slots, include or exclude, bool(include), hostfile)
        options = ("--include", include) if include else ("--exclude", exclude)
    if nodes is not None:
        if not 1 <= nodes <= len(slots):
            raise UserError(f"--nodes {nodes}: {hostfile} has {len(slots)} hosts.")
        slots = dict(list(slots.items())[:nodes])
        options += ("--num_nodes", str(nodes))
    if gpus is not None:
        for host, there in slots.items():
            if not 1 <= gpus <= len(there):
                raise UserError(f"--gpus {gpus}: {host} has slots={len(there)} in {hostfile}.")
        slots = {host: tuple(range(gpus)) for host in slots}
        options += ("--num_gpus", str(gpus))
    if not slots:
        raise UserError(f"--exclude {exclude}: leaves no host of {hostfile}.")
    return Pool(slots, hostfile.resolve(), options)


def parse(hostfile: Path) -> dict[str, tuple[int, ...]]:
    """Return a hostfile's hosts with their slots.

    Raises:
        UserError: names the line.
    """
    try:
        lines = hostfile.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--hostfile {hostfile}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}.") from None
    slots: dict[str, tuple[int, ...]] = {}
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        count = re.fullmatch(r"slots=(\d+)", words[1]) if len(words) == 2 else None
        # Names go into pdsh's comma-separated list and into shell commands.
        if not count or not re.fullmatch(r"[A-Za-z0-9][\w.:-]*", words[0]):
            raise UserError(f"{hostfile}:{number}: `{line.strip()}` is no host; a line is `name slots=8`.")
        if int(count[1]) == 0:
            raise UserError(f"{hostfile}:{number}: {words[0]} has slots=0; give at least 1, or take the line out.")
        if words[0] in slots:
            raise UserError(f"{hostfile}:{number}: {words[0]} stands here a second time; one line per host.")
        slots[words[0]] = tuple(range(int(count[1])))
    if not slots:
        raise UserError(f"{hostfile}: no hosts; a line is `name slots=8`.")
    return slots


def _filtered(slots: dict[str, tuple[int, ...]], text: str, include: bool, hostfile: Path) -> dict[str, Any]:
    flag = "--include" if include else "--exclude"
    named: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        host, _, listed = part.partition(":")
        if host not in slots:
            raise UserError(f"{flag} {text}: {host!r} is not in {hostfile}: {', '.join(slots)}.")
        if not re.fullmatch(r"(\d+(,\d+)*)?", listed) or part.endswith(":"):
            raise UserError(f"{flag} {text}: slots are numbers with commas, as in {host}:0,2.")
        chosen = tuple(sorted({int(slot) for slot in listed.split(",")})) if listed else slots[host]
        for slot in chosen:
            if slot not in slots[host]:
                raise UserError(f"{flag} {text}: {host} has the slots 0 to {len(slots[host]) - 1} in {hostfile}.")
        named[host] = tuple(sorted({*named.get(host, ()), *chosen}))
    if include:
        return {host: named[host] for host in slots if host in named}
    left = {host: tuple(slot for slot in there if slot not in named.get(host, ())) for host, there in slots.items()}
    return {host: there for host, there in left.items() if there}


def launcher_options(pool: Pool, master: str) -> list[str]:
    """Return what `deepspeed` is told about the hosts.

    Raises:
        UserError: pdsh is not installed.
    """
    if not shutil.which("pdsh"):
        raise UserError("--hostfile: DeepSpeed's launcher needs pdsh on this machine (Debian: apt-get install pdsh).")
    # Without --force_multi a pool of one host would be started here, whatever its name.
    return ["--hostfile", str(pool.hostfile), *pool.options, "--master_addr", master, "--force_multi"]


def write_environment(folder: RunFolder, environment: Mapping[str, str]) -> Path:
    """Write what pdsh has to carry to the hosts, in DeepSpeed's form, say what that is, and return the file.

    What stands in the user's own `~/.deepspeed_env` and `./.deepspeed_env` goes with it where ours says nothing else:
    DeepSpeed reads one file only, and `DS_ENV_FILE` makes it ours.
    """
    own: dict[str, str] = {}
    for path in (Path.home() / ".deepspeed_env", Path(".deepspeed_env")):
        if path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines()
            own |= {name: value for name, equals, value in (line.partition("=") for line in lines) if equals}
    carried = {name: value for name, value in own.items() if not is_secret(name, value)}
    carried |= variables.travelling(environment)
    carried["TORCH_EXTENSIONS_DIR"] = environment["TORCH_EXTENSIONS_DIR"]
    # The ranks look ninja up on the PATH. The rest of the PATH is the host's own business.
    carried["PATH"] = f"{Path(sys.executable).parent}:$PATH"
    print(f"forwarded: {', '.join(carried)}", flush=True)
    if left := sorted({*own} - {*carried} | {*variables.staying(environment)}):
        print(f"not forwarded, as secrets: {', '.join(left)}; each host has to have them by itself", flush=True)
    file = folder.path / "deepspeed_env"
    file.write_text("".join(f"{name}={value}\n" for name, value in carried.items()), encoding="utf-8")
    return file


def supervised(pool: Pool, folder: RunFolder, command: list[str], environment: Mapping[str, str]) -> Ended:
    """Run DeepSpeed's launcher for a pool and return how that ended; no rank outlives it on any host."""
    launcher = {**environment, "DS_ENV_FILE": str(write_environment(folder, environment))}
    # None of the ranks is a process of this machine's, not even those on it: pdsh starts them through ssh.
    ended = supervise(command, launcher, folder, pool.ranks, lambda _: Watchers(pool, folder))
    if ended.status:
        signal_ranks(pool, folder, signal.SIGKILL)  # pdsh ends its ssh, which ends nothing at the other end
    return ended


class Watchers:
    """A process on each host of a pool that tells of its ranks' ends, and ends them when it hears nothing from here."""

    def __init__(self, pool: Pool, folder: RunFolder) -> None:
        """Start them."""
        self.signal = lambda number: signal_ranks(pool, folder, number)
        self.poll = select.poll()
        self.hosts: dict[int, tuple[str, subprocess.Popen]] = {}  # by the descriptor of what they say
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "bufsize": 0}
        for host, slots in pool.slots.items():
            command = module("recipes.launching.ranks", "watch", str(len(slots)), str(folder.path))
            process = subprocess.Popen([*SSH, *ALIVE, host, command], start_new_session=True, **pipes)
            self.hosts[process.stdout.fileno()] = (host, process)
            self.poll.register(process.stdout, select.POLLIN)

    def fallen(self, seconds: float) -> list[Fallen]:
        """Wait at most that long and return the ranks that ended badly meanwhile, and the hosts that were lost."""
        for _, process in self.hosts.values():
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(b"\n")
        found = []
        for descriptor, _ in self.poll.poll(1000 * seconds):
            host, process = self.hosts[descriptor]
            line = process.stdout.readline()
            if not line:
                self.poll.unregister(descriptor)
                if process.wait() == LOST:
                    found.append(Fallen(None, None, host))
            elif line.startswith(b"{"):  # a login may greet
                found.append(Fallen(host=host, **json.loads(line)))
        return found

    def close(self) -> None:
        """End them, and with them what there is left of the ranks."""
        for _, process in self.hosts.values():
            process.stdin.close()
        for _, process in self.hosts.values():
            try:
                process.wait(WATCHER_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def reachable(pool: Pool, folder: RunFolder) -> Pool:
    """Return the pool without the hosts that do not answer; on the others nothing of the run is left after this."""
    answers = signal_ranks(pool, folder, signal.SIGKILL)
    alive = [host for host, answer in zip(pool.hosts, answers, strict=True) if answer.returncode == 0]
    return _listed(pool, {host: pool.slots[host] for host in alive})


def taking(pool: Pool, ranks: int) -> Pool:
    """Return the pool with its first `ranks` slots only."""
    if ranks == pool.ranks:
        return pool
    slots: dict[str, tuple[int, ...]] = {}
    for host, there in pool.slots.items():
        if ranks:
            slots[host] = there[:ranks]
            ranks -= len(slots[host])
    return _listed(pool, slots)


def _listed(pool: Pool, slots: Mapping[str, tuple[int, ...]]) -> Pool:
    if slots == pool.slots:
        return pool
    named = "@".join(f"{host}:{','.join(map(str, there))}" for host, there in slots.items())
    return Pool(slots, pool.hostfile, ("--include", named))


def signal_ranks(pool: Pool, folder: RunFolder, number: int) -> list[subprocess.CompletedProcess]:
    """Send a signal to the run's ranks on every host; SIGKILL ends the launchers above them too."""
    return on_each(pool.hosts, lambda _: module("recipes.launching.ranks", "signal", str(number), str(folder.path)))


def module(name: str, *arguments: str) -> str:
    """Return the shell command that runs a module of this checkout, in the environment that this process has.

    It ends with status 91 where the checkout is not, and with 92 where its Python is not.
    """
    where = f"cd {shlex.quote(str(ROOT))} 2>/dev/null || exit 91; test -x {shlex.quote(sys.executable)} || exit 92; "
    return where + shlex.join(["exec", "env", f"PYTHONPATH={ROOT}", sys.executable, "-m", name, *arguments])


def on_each(hosts: tuple[str, ...], command: Callable[[str], str]) -> list[subprocess.CompletedProcess]:
    """Run `command(host)` on every host at the same time and return what came of each; status 255 is ssh's own."""

    def on(host: str) -> subprocess.CompletedProcess:
        line = [*SSH, host, command(host)]
        try:
            return subprocess.run(line, capture_output=True, text=True, timeout=SSH_TIMEOUT, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(line, LOST, "", f"no answer within {SSH_TIMEOUT} s")

    with ThreadPoolExecutor(min(64, len(hosts))) as pool:
        return list(pool.map(on, hosts))
