"""Other hosts over ssh: checks them before a run, starts and signals ranks there, and writes the environment for pdsh.

That environment becomes part of one command line for the shell of each host: DeepSpeed writes `export NAME="VALUE";`
without any escaping, and pdsh replaces `%h`, `%n` and `%u`.
"""

import contextlib
import json
import re
import select
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...recipe import files
from ...recipe.errors import UserError, is_secret
from ...recipe.files import Json, JsonView
from ...recipe.project import IMPORT_ROOT, python_path
from ...recipe.run_folder import RunFolder
from .. import command
from ..supervise import FailedRank
from .hostfile import HostPool

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


EXPORTED = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
"""Prefixes of the variables that DeepSpeed exports from the environment of its launcher."""
EXPANSION = re.compile(r"\$(?=[A-Za-z_]|\{\w+\})")
"""A reference to a variable of the host, `$NAME` or `${NAME}`."""


def launcher_environment(folder: RunFolder, environment: Mapping[str, str]) -> dict[str, str]:
    """Write the file of forwarded variables, and return an environment with which DeepSpeed exports no others.

    DeepSpeed reads only one file, which `DS_ENV_FILE` sets to this one. It includes the variables of the user's
    `~/.deepspeed_env` that do not contradict ours; `$NAME` in them is a variable of the host, as in that file. A
    `.deepspeed_env` in the current folder, which DeepSpeed would prefer, is ignored: it may be part of downloaded data,
    and could load code into every rank.
    """
    home, here = (folder / ".deepspeed_env" for folder in (Path.home(), Path.cwd()))
    lines = home.read_text(encoding="utf-8").splitlines() if home.is_file() else []
    own = {name: value for name, equals, value in (line.partition("=") for line in lines) if equals and name[:1] != "#"}
    if here.is_file() and here != home:
        print(f"{here}: ignored; move the variables that you need to {home}", flush=True)
    if odd := [name for name in own if not command.is_name(name)]:
        print(f"{home}: ignored, since they name no variable: {', '.join(odd)}", flush=True)
    own = {name: value for name, value in own.items() if name not in odd}
    passed = [name for name, value in own.items() if not is_secret(name, value)]
    taken = {name: _quoted(name, own[name], EXPANSION) for name in passed}
    taken |= {name: _quoted(name, value) for name, value in command.forwarded(environment).items()}
    needed = [name for name in ("PYTHONPATH", "TORCH_EXTENSIONS_DIR") if name in environment]
    taken |= {name: _quoted(name, environment[name]) for name in needed}
    # The ranks find ninja on the PATH. The rest of the PATH is each host's own.
    taken["PATH"] = f"{_quoted('PATH', str(Path(sys.executable).parent))}:$PATH"
    print(f"forwarded: {', '.join(taken)}", flush=True)
    if left := sorted({*own} - {*taken} | {*command.withheld(environment)}):
        print(f"not forwarded, because they look like secrets: {', '.join(left)}; set them on each host", flush=True)
    file = folder.path / "deepspeed_env"
    files.write_text(file, "".join(f"{name}={value}\n" for name, value in taken.items()))
    kept = {name: value for name, value in environment.items() if name in taken or not name.startswith(EXPORTED)}
    return kept | {"DS_ENV_FILE": str(file)}


def _quoted(name: str, value: str, kept: re.Pattern[str] | None = None) -> str:
    """Return a value escaped for the file, so that DeepSpeed, pdsh and the host's shell do not change it.

    A dollar sign at which `kept` matches keeps its meaning. A line break is refused.
    """
    if "\n" in value or "\r" in value:
        raise UserError(f"{name}={value.splitlines()[0]}...: a line break cannot be sent over ssh; remove it.")
    escaped = re.sub(
        r"[\\\"`$]", lambda found: found[0] if kept and kept.match(value, found.start()) else f"\\{found[0]}", value
    )
    escaped = escaped.replace("%", "%%")
    return f'""{escaped}""' if value != value.strip() else escaped  # DeepSpeed strips before it quotes


ALIVE = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3", "-o", "ControlPath=none")
"""A host that does not answer for 15 to 20 s is lost. A connection shared with other logins would not detect it."""
CLOSE_TIMEOUT = 5
"""Seconds within which a host must end its watcher."""


class RemoteWatcher:
    """Watches the ranks on all hosts of a pool, through one process on each host.

    That process reports the ranks that fail, and kills them if it no longer receives data from here.
    """

    def __init__(self, pool: HostPool, folder: RunFolder) -> None:
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


CLOCK_SECONDS = 5.0
"""Largest difference between clocks: beyond it file dates mislead DeepSpeed, which rebuilds ops older than their
sources."""
COLUMNS = ("host", "reached", "code", "versions", "ops", "GPUs", "disk free", "clock", "network", "folder")
Answer = JsonView
"""The result of `host_info` for a host, or `{"failed": REASON}`."""


def check_hosts(pool: HostPool, folder: Path, ask: Callable[[Path, str], list[Answer]]) -> list[Answer]:
    """Check that all hosts can run the job and share its folder; print a table of their answers, and return them.

    Every host is compared with the first; the existing part of the folder's path has to be the same folder on each.
    `ask` returns each host's answer, given this part and the name of a file that was written there.
    """
    existing = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    token = existing / f".hosts-{uuid.uuid4().hex[:12]}"
    try:
        token.touch()
    except OSError as error:
        raise UserError(f"{existing}: {error.strerror}; choose another --output-dir.") from None
    try:
        answers = ask(existing, token.name)
    finally:
        token.unlink(missing_ok=True)
    named = list(zip(pool.hosts, answers, strict=True))
    print(table(named), flush=True)
    found = [line for host, answer in named for line in problems(host, answer, answers[0], pool, existing)]
    if found:
        more = [f"({len(found) - 2} more)"] if len(found) > 2 else []
        raise UserError("\n".join([*found[:2], *more]))
    return answers


def ask_by_ssh(pool: HostPool, meeting: str, extensions: str, folder: Path, file: str) -> list[Answer]:
    """Return each host's answer over ssh, or `{"failed": REASON}`.

    `meeting` is the rendezvous address, `extensions` the folder of built ops on every host; `file` was written in
    `folder`.
    """

    def command(host: str) -> str:
        variable = f"export TORCH_EXTENSIONS_DIR={shlex.quote(extensions)}; "
        peer = "" if host == pool.hosts[0] else meeting
        return variable + module_command("deepspeed_recipes.launching.ssh.host_info", str(folder), file, peer)

    asked = time.time()
    results = run_on_each(pool.hosts, command)
    answered = time.time()
    answers: list[Answer] = []
    for result in results:
        if result.returncode == 0:
            answer: Json = json.loads(result.stdout.splitlines()[-1])
            # The clock is in sync if the host's time lies between our times before and after the query.
            answers.append(answer | {"clock": max(asked - answer["time"], answer["time"] - answered, 0.0)})
            continue
        last = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        failures = {
            NO_CONNECTION: f"not reachable: {last}",
            NO_CHECKOUT: f"no folder {IMPORT_ROOT}; the project must be at the same path on every host",
            NO_PYTHON: f"no {sys.executable}; the environment must be at the same path on every host",
        }
        answers.append({"failed": failures.get(result.returncode, f"different checkout or environment: {last}")})
    return answers


def problems(host: str, answer: Answer, first: Answer, pool: HostPool, folder: Path) -> list[str]:
    """Return every reason why a run cannot start with this host."""
    if "failed" in answer:
        return [f"{host}: {answer['failed']}"]
    found = []
    if "failed" not in first:
        if answer["code"] != first["code"]:
            theirs = f"commit {answer['commit'] or '-'} ({answer['code']})"
            ours = f"{pool.hosts[0]} has {first['commit'] or '-'} ({first['code']})"
            found.append(f"{host}: {theirs}, but {ours}; run git pull")
        for name, version in answer["versions"].items():
            if version != first["versions"].get(name):
                wanted = first["versions"].get(name)
                found.append(f"{host}: {name} {version}, but {pool.hosts[0]} has {wanted}; run make install")
        missing = sorted(set(first["ops"]) - set(answer["ops"]))
        if missing:
            build = "run ds-recipes doctor --build there"
            found.append(f"{host}: DeepSpeed's {', '.join(missing)} not built; {build}")
        if bool(answer["gpus"]) != bool(first["gpus"]):
            found.append(f"{host}: {len(answer['gpus'])} GPUs, but {pool.hosts[0]} has {len(first['gpus'])}")
    if answer["gpus"] and max(pool.slots[host]) >= len(answer["gpus"]):
        slots = max(pool.slots[host]) + 1
        found.append(f"{host}: {len(answer['gpus'])} GPUs, but slots={slots} in the hostfile")
    if answer["clock"] > CLOCK_SECONDS:
        found.append(f"{host}: its clock is off by {answer['clock']:.0f} s; synchronise it (NTP)")
    if not answer["interface"]:
        found.append(f"{host}: no route to {pool.hosts[0]}; set the rendezvous address with --master-addr")
    if not answer["shared"]:
        what = "is a different folder there" if answer["free_gib"] is not None else "does not exist there"
        found.append(f"{host}: {folder} {what}; choose an --output-dir that all hosts share")
    return found


def table(named: Sequence[tuple[str, Answer]]) -> str:
    """Return the hosts' answers as a table; the versions are compared with those of the first host."""
    rows: list[tuple[str, ...]] = [COLUMNS]
    first = named[0][1]
    for host, answer in named:
        if "failed" in answer:
            rows.append((host, "no", *["-"] * (len(COLUMNS) - 2)))
            continue
        versions = answer["versions"]
        others = ", ..." if "failed" not in first and versions == first["versions"] else ", others differ"
        cells = (
            host,
            "yes",
            f"{answer['commit'] or '-'} ({answer['code']})",
            f"torch {versions['torch']}, deepspeed {versions['deepspeed']}{others}",
            str(len(answer["ops"])),
            f"{len(answer['gpus'])} x {answer['gpus'][0]}" if answer["gpus"] else "none",
            "-" if answer["free_gib"] is None else f"{answer['free_gib']} GiB",
            f"{answer['clock']:.0f} s off" if answer["clock"] else "in sync",
            (answer["interface"] or "-") + (f" {answer['megabits'] / 1000:g} Gb/s" if answer["megabits"] else ""),
            "shared" if answer["shared"] else "no",
        )
        rows.append(cells)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in rows)


def network_interfaces(answers: list[Answer], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make gloo and NCCL use the working interface, if it has the same name on all hosts.

    By default gloo uses the address of the host's own name, which is 127.0.1.1 in Debian's /etc/hosts. The user's own
    variables are kept.
    """
    names = {answer["interface"] for answer in answers}
    if len(names) > 1:
        print(f"interfaces differ ({', '.join(sorted(names))}); NCCL and gloo choose their own", flush=True)
        return {}
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: environment.get(name, answers[0]["interface"]) for name in variables}
