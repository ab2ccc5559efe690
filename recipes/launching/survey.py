"""The pre-flight of several hosts: one table, and a reason not to start."""

import json
import shlex
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.launching import hosts
from recipes.spec.errors import UserError
from recipes.spec.pages import ROOT

CLOCK_SECONDS = 5.0
"""Further apart than this, file dates mislead: DeepSpeed rebuilds ops that are older than their sources."""
COLUMNS = ("host", "reached", "code", "versions", "ops", "GPUs", "disk free", "clock", "network", "folder")
Report = Mapping[str, Any]


def check(pool: hosts.Pool, folder: Path, master: str | None, extensions: str) -> list[Report]:
    """Ask every host, print the table, and return each host's answer.

    Args:
        pool: the hosts, the first of them the one that the others are compared with.
        folder: the run's folder; what exists of its path has to be the same folder on every host.
        master: the address that ranks meet at, if it is not the first host's name.
        extensions: the folder of built ops, on every host.

    Raises:
        UserError: a host that cannot take part, or that would take part differently.
    """
    existing = next(place for place in (folder, *folder.parents) if place.is_dir())
    token = existing / f".hosts-{uuid.uuid4().hex[:12]}"
    try:
        token.touch()
    except OSError as error:
        raise UserError(f"{existing}: {error.strerror}; choose another --output-dir.") from None
    try:
        reports = ask(pool, existing, token.name, master or pool.hosts[0], extensions)
    finally:
        token.unlink(missing_ok=True)
    named = list(zip(pool.hosts, reports, strict=True))
    print(table([row(host, report, reports[0]) for host, report in named]), flush=True)
    wrong = [line for host, report in named for line in problems(host, report, reports[0], pool, existing)]
    if wrong:
        more = [f"({len(wrong) - 2} more)"] if len(wrong) > 2 else []
        raise UserError("\n".join([*wrong[:2], *more]))
    return reports


def ask(pool: hosts.Pool, folder: Path, file: str, meeting: str, extensions: str) -> list[Report]:
    """Return what each host says of itself; `{"failed": why}` where it says nothing."""

    def command(host: str) -> str:
        variable = f"export TORCH_EXTENSIONS_DIR={shlex.quote(extensions)}; "
        peer = "" if host == pool.hosts[0] else meeting
        return variable + hosts.module("recipes.launching.probe", str(folder), file, peer)

    asked = time.time()
    answers = hosts.on_each(pool.hosts, command)
    answered = time.time()
    return [understood(answer, asked, answered) for answer in answers]


def understood(answer: Any, asked: float, answered: float) -> Report:
    """Return a host's report, or why there is none."""
    if answer.returncode == 0:
        report = json.loads(answer.stdout.splitlines()[-1])
        # Its clock is right if it stood between ours before and ours after.
        return report | {"clock": max(asked - report["time"], report["time"] - answered, 0.0)}
    last = (answer.stderr.strip().splitlines() or ["no reason given"])[-1]
    failures = {
        255: f"not reachable: {last}",
        91: f"no folder {ROOT}: the checkout stands at the same path on every host",
        92: f"no {sys.executable}: the environment stands at the same path on every host",
    }
    return {"failed": failures.get(answer.returncode, f"another checkout or environment: {last}")}


def problems(host: str, report: Report, first: Report, pool: hosts.Pool, folder: Path) -> list[str]:
    """Return what keeps a run from starting with this host."""
    if "failed" in report:
        return [f"{host}: {report['failed']}"]
    found = []
    if "failed" not in first:
        if report["code"] != first["code"]:
            theirs = f"commit {report['commit'] or '-'} ({report['code']})"
            found.append(f"{host}: {theirs}, {pool.hosts[0]} has {first['commit'] or '-'} ({first['code']}); git pull")
        for name, version in report["versions"].items():
            if version != first["versions"].get(name):
                wanted = first["versions"].get(name)
                found.append(f"{host}: {name} {version}, {pool.hosts[0]} has {wanted}; make install")
        missing = sorted(set(first["ops"]) - set(report["ops"]))
        if missing:
            found.append(f"{host}: DeepSpeed's {', '.join(missing)} not built; python scripts/doctor.py --build there")
        if bool(report["gpus"]) != bool(first["gpus"]):
            found.append(f"{host}: {len(report['gpus'])} GPUs, {pool.hosts[0]} has {len(first['gpus'])}")
    if report["gpus"] and max(pool.slots[host]) >= len(report["gpus"]):
        slots = max(pool.slots[host]) + 1
        found.append(f"{host}: {len(report['gpus'])} GPUs, the hostfile says slots={slots}")
    if report["clock"] > CLOCK_SECONDS:
        found.append(f"{host}: its clock is {report['clock']:.0f} s off; set it (NTP)")
    if not report["interface"]:
        found.append(f"{host}: no route to {pool.hosts[0]}; give the address that ranks meet at with --master-addr")
    if not report["shared"]:
        what = "is another folder there" if report["free_gib"] is not None else "is not there"
        found.append(f"{host}: {folder} {what}; choose an --output-dir that all hosts share")
    return found


def row(host: str, report: Report, first: Report) -> tuple[str, ...]:
    """Return a host's line of the table."""
    if "failed" in report:
        return (host, "no", *["-"] * (len(COLUMNS) - 2))
    same = "failed" not in first and report["versions"] == first["versions"]
    versions = report["versions"]
    speed = f" {report['megabits'] / 1000:g} Gb/s" if report["megabits"] else ""
    return (
        host,
        "yes",
        f"{report['commit'] or '-'} ({report['code']})",
        f"torch {versions['torch']}, deepspeed {versions['deepspeed']}{', ...' if same else ', others differ'}",
        str(len(report["ops"])),
        f"{len(report['gpus'])} x {report['gpus'][0]}" if report["gpus"] else "none",
        "-" if report["free_gib"] is None else f"{report['free_gib']} GiB",
        f"{report['clock']:.0f} s off" if report["clock"] else "right",
        f"{report['interface'] or '-'}{speed}",
        "shared" if report["shared"] else "no",
    )


def table(rows: list[tuple[str, ...]]) -> str:
    """Return the rows under their headings."""
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in (COLUMNS, *rows))


def interfaces(reports: list[Report], environment: Mapping[str, str]) -> dict[str, str]:
    """Return which interface gloo and NCCL are to use: the one that was seen to work, where all hosts call it alike.

    Left to itself gloo takes the address of the host's own name, which Debian's /etc/hosts gives as 127.0.1.1.
    What the user has set stays.
    """
    names = {report["interface"] for report in reports}
    if len(names) > 1:
        print(f"interfaces: {', '.join(sorted(names))}; NCCL and gloo find theirs by themselves", flush=True)
        return {}
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: environment.get(name, reports[0]["interface"]) for name in variables}
