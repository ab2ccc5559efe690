"""Checks before a run on several hosts: queries each host, prints one table, and reports every reason not to start."""

import json
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from ...recipe.errors import UserError
from ...recipe.files import Json, JsonView
from ...recipe.project import IMPORT_ROOT
from . import remote
from .hostfile import HostPool

CLOCK_SECONDS = 5.0
"""Largest difference between clocks: beyond it file dates mislead DeepSpeed, which rebuilds ops older than their
sources."""
COLUMNS = ("host", "reached", "code", "versions", "ops", "GPUs", "disk free", "clock", "network", "folder")
Answer = JsonView
"""The result of `host_info` for a host, or `{"failed": REASON}`."""


def check(pool: HostPool, folder: Path, ask: Callable[[Path, str], list[Answer]]) -> list[Answer]:
    """Check that all hosts can run the job and share its folder; print a table of their answers, and return them.

    Args:
        pool: the hosts; the others are compared with the first.
        folder: the run's folder; the existing part of its path has to be the same folder on every host.
        ask: returns each host's answer, given this part of the path and the name of a file that was written there.

    Raises:
        UserError: a host cannot be reached, or differs from the first.
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
    print(table([table_row(host, answer, answers[0]) for host, answer in named]), flush=True)
    found = [line for host, answer in named for line in problems(host, answer, answers[0], pool, existing)]
    if found:
        more = [f"({len(found) - 2} more)"] if len(found) > 2 else []
        raise UserError("\n".join([*found[:2], *more]))
    return answers


def ask_by_ssh(pool: HostPool, folder: Path, file: str, meeting: str, extensions: str) -> list[Answer]:
    """Return each host's answer over ssh, or `{"failed": REASON}`.

    Args:
        pool: the hosts.
        folder: the folder in which `file` was written.
        file: the file's name.
        meeting: the rendezvous address.
        extensions: the folder of built ops, on every host.
    """

    def command(host: str) -> str:
        variable = f"export TORCH_EXTENSIONS_DIR={shlex.quote(extensions)}; "
        peer = "" if host == pool.hosts[0] else meeting
        return variable + remote.module_command("deepspeed_recipes.launching.ssh.host_info", str(folder), file, peer)

    asked = time.time()
    results = remote.run_on_each(pool.hosts, command)
    answered = time.time()
    return [parse_answer(result, asked, answered) for result in results]


def parse_answer(result: subprocess.CompletedProcess[str], asked: float, answered: float) -> Answer:
    """Return a host's answer, or the reason why there is none."""
    if result.returncode == 0:
        answer: Json = json.loads(result.stdout.splitlines()[-1])
        # The clock is in sync if the host's time lies between our times before and after the query.
        return answer | {"clock": max(asked - answer["time"], answer["time"] - answered, 0.0)}
    last = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
    failures = {
        remote.NO_CONNECTION: f"not reachable: {last}",
        remote.NO_CHECKOUT: f"no folder {IMPORT_ROOT}; the project must be at the same path on every host",
        remote.NO_PYTHON: f"no {sys.executable}; the environment must be at the same path on every host",
    }
    return {"failed": failures.get(result.returncode, f"different checkout or environment: {last}")}


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
        found.append(f"{host}: {len(answer['gpus'])} GPUs, but the hostfile says slots={slots}")
    if answer["clock"] > CLOCK_SECONDS:
        found.append(f"{host}: its clock is off by {answer['clock']:.0f} s; synchronise it (NTP)")
    if not answer["interface"]:
        found.append(f"{host}: no route to {pool.hosts[0]}; set the rendezvous address with --master-addr")
    if not answer["shared"]:
        what = "is a different folder there" if answer["free_gib"] is not None else "does not exist there"
        found.append(f"{host}: {folder} {what}; choose an --output-dir that all hosts share")
    return found


def table_row(host: str, answer: Answer, first: Answer) -> tuple[str, ...]:
    """Return a host's line of the table."""
    if "failed" in answer:
        return (host, "no", *["-"] * (len(COLUMNS) - 2))
    same = "failed" not in first and answer["versions"] == first["versions"]
    versions = answer["versions"]
    speed = f" {answer['megabits'] / 1000:g} Gb/s" if answer["megabits"] else ""
    return (
        host,
        "yes",
        f"{answer['commit'] or '-'} ({answer['code']})",
        f"torch {versions['torch']}, deepspeed {versions['deepspeed']}{', ...' if same else ', others differ'}",
        str(len(answer["ops"])),
        f"{len(answer['gpus'])} x {answer['gpus'][0]}" if answer["gpus"] else "none",
        "-" if answer["free_gib"] is None else f"{answer['free_gib']} GiB",
        f"{answer['clock']:.0f} s off" if answer["clock"] else "in sync",
        f"{answer['interface'] or '-'}{speed}",
        "shared" if answer["shared"] else "no",
    )


def table(rows: list[tuple[str, ...]]) -> str:
    """Return the table as text, with its headings."""
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in (COLUMNS, *rows))


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
