"""A run's hosts: reads and filters a hostfile by the rules of DeepSpeed's launcher.

The file has one `name slots=N` per line, without users' names and ports; `--include` and `--exclude` are DeepSpeed's
too: `host1@host2:0,2`.
"""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...recipe.errors import UserError

HOST = re.compile(r"[A-Za-z0-9][\w.:-]*")
"""A host's name or address, which is used in pdsh's comma-separated list and in shell commands."""
WORD = re.compile(r"[\w@+=:,./-]+")
"""Text that neither the shells nor pdsh, which replaces `%`, change."""


@dataclass(frozen=True)
class HostPool:
    """The hosts of a run, and the slots (GPUs, or CPU ranks) that it uses on each."""

    slots: Mapping[str, tuple[int, ...]]
    """In the hostfile's order, which is the order of the ranks."""
    hostfile: Path
    options: tuple[str, ...] = ()
    """Options of DeepSpeed's launcher in addition to the hostfile."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names."""
        return tuple(self.slots)

    @property
    def ranks(self) -> int:
        """The world size."""
        return sum(map(len, self.slots.values()))

    @property
    def most_ranks(self) -> int:
        """The largest number of ranks on a host."""
        return max(map(len, self.slots.values()))


def read(
    hostfile: Path, include: str = "", exclude: str = "", nodes: int | None = None, gpus: int | None = None
) -> HostPool:
    """Return the hosts that the options select from a hostfile, by the rules of DeepSpeed's launcher.

    Refuses lines that DeepSpeed would misread, filters that name no host or slot, and more nodes or GPUs than exist.
    """
    slots = parse(hostfile)
    if (include or exclude) and (nodes or gpus):
        raise UserError("--include and --exclude already select hosts and slots; leave out --nodes and --gpus.")
    if include and exclude:
        raise UserError("--include and --exclude: give one of them, not both.")
    options: tuple[str, ...] = ()
    if text := include or exclude:
        flag = "--include" if include else "--exclude"
        named: dict[str, tuple[int, ...]] = {}
        for part in text.split("@"):
            host, _, listed = part.partition(":")
            if host not in slots:
                raise UserError(f"{flag} {text}: {host!r} is not in {hostfile}, which has {', '.join(slots)}.")
            if not re.fullmatch(r"(\d{1,4}(,\d{1,4})*)?", listed) or part.endswith(":"):
                raise UserError(f"{flag} {text}: slots are numbers separated by commas, as in {host}:0,2.")
            chosen = set(map(int, listed.split(","))) if listed else set(slots[host])
            if not chosen <= set(slots[host]):
                raise UserError(f"{flag} {text}: {host} has slots 0 to {len(slots[host]) - 1} in {hostfile}.")
            named[host] = tuple(sorted({*named.get(host, ()), *chosen}))
        if exclude:
            named = {host: tuple(slot for slot in slots[host] if slot not in named.get(host, ())) for host in slots}
        slots = {host: named[host] for host in slots if named.get(host)}
        options = (flag, text)
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
        raise UserError(f"--exclude {exclude}: excludes every host of {hostfile}; keep at least one.")
    return HostPool(slots, hostfile.resolve(), options)


def parse(hostfile: Path) -> dict[str, tuple[int, ...]]:
    """Return a hostfile's hosts with their slots."""
    try:
        lines = hostfile.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--hostfile {hostfile}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}.") from None
    if lines and lines[0].startswith("\ufeff"):
        raise UserError(f"{hostfile}: begins with a byte order mark, which DeepSpeed does not read; save it without.")
    slots: dict[str, tuple[int, ...]] = {}
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        named = rf"([\w.-]+@)?({HOST.pattern}(?<!:)|\[\w*:[\w.:]+\](:\d+)?)"
        if re.fullmatch(named, words[0]) and {"@", ":"} & {*words[0]}:
            # DeepSpeed's filters split at `@` and `:`, and pdsh splits at `:`.
            user, _, address = words[0].rpartition("@")
            host, _, port = address.partition(":")
            settings = [f"User {user}"] if user else []
            if ":" in port:  # an IPv6 address, in brackets if a port follows
                address, _, port = address.removeprefix("[").partition("]:")
                host, settings = "NAME", [f"HostName {address.removesuffix(']')}", *settings]
            if port:
                settings.append(f"Port {port}")
            raise UserError(
                f"{hostfile}:{number}: {words[0]}: a hostfile has names and IPv4 addresses only; write `{host} "
                f"slots=8`, and add to ~/.ssh/config, which ssh and pdsh both read: `Host {host}`, and below it "
                f"`{'` and `'.join(settings)}`."
            )
        count = re.fullmatch(r"slots=(\d{1,4})", words[1]) if len(words) == 2 else None
        if not count or ":" in words[0] or not HOST.fullmatch(words[0]):
            raise UserError(
                f"{hostfile}:{number}: `{line.strip()}` is not a valid hostfile line; write `name slots=8`."
            )
        if int(count[1]) == 0:
            raise UserError(f"{hostfile}:{number}: {words[0]} has slots=0; give it at least 1, or remove the line.")
        if words[0].lower() in map(str.lower, slots):
            raise UserError(f"{hostfile}:{number}: {words[0]} is listed twice; write one line per host.")
        slots[words[0]] = tuple(range(int(count[1])))
    if not slots:
        raise UserError(f"{hostfile}: no hosts; write one `name slots=8` per line.")
    return slots


def check_command(folder: Path, master: str | None) -> None:
    """Refuse values that DeepSpeed would put unquoted into the shell command on each host."""
    if master is not None and not HOST.fullmatch(master):
        raise UserError(f"--master-addr {master!r}: not a host's name or address.")
    for what, path in (("--output-dir", str(folder)), ("the current folder", os.getcwd()), ("Python", sys.executable)):
        if not WORD.fullmatch(path):
            raise UserError(
                f"{what} {path!r}: with --hostfile a path may have letters, digits and @+=:,./_- only; choose another."
            )


def with_slots(pool: HostPool, slots: Mapping[str, tuple[int, ...]]) -> HostPool:
    """Return the pool with other slots, listed in the launcher's options."""
    if slots == pool.slots:
        return pool
    listed = "@".join(f"{host}:{','.join(map(str, there))}" for host, there in slots.items())
    return HostPool(slots, pool.hostfile, ("--include", listed))
