"""Facts about one host, printed as JSON before a run: `python -m ...ssh.host_info FOLDER FILE PEER`."""

import contextlib
import hashlib
import json
import os
import shutil
import socket
import sys
import time
from pathlib import Path

import psutil

from ...machine import software
from ...machine.system import output
from ...recipe.files import Json
from ...recipe.gpus import GIB
from ...recipe.project import CONFIGS, PACKAGE, PAGES


def collect(folder: Path, file: str, peer: str) -> Json:
    """Return the facts that must be equal on all hosts, or sufficient on each host.

    The run's folder will be created in `folder`, in which the launcher has written `file`. `peer` is the rendezvous
    host, empty on that host itself.
    """
    gpus = (output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or "").splitlines()
    os.environ["DS_ACCELERATOR"] = "cuda" if gpus else "cpu"  # so that `software.ops` does not import torch
    address = ""  # there may be no route, or a name that cannot be resolved
    if peer:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
            route.connect((peer, 9))  # sends nothing, and only gets the route from the kernel
            address = str(route.getsockname()[0])
    elif connection := os.environ.get("SSH_CONNECTION", "").split():
        address = connection[2]  # under which ssh has reached this host
    interface, speed = network(address)
    return {
        "commit": output("git", "-C", str(PACKAGE), "rev-parse", "--short=9", "HEAD") or "",
        "code": fingerprint(),
        "versions": versions(),
        "ops": sorted(check.name.removeprefix("op ") for check in software.ops() if check.state == "ok"),
        "gpus": gpus,
        "free_gib": round(shutil.disk_usage(folder).free / GIB, 1) if folder.is_dir() else None,
        "address": address,
        "interface": interface,
        "megabits": speed,
        "shared": (folder / file).is_file(),
        "time": time.time(),
    }


def fingerprint(package: Path = PACKAGE) -> str:
    """Return a digest of code, tables and configurations; checkouts with the same digest behave the same."""
    digest = hashlib.sha256()
    for folder, pattern in ((package, "**/*.py"), (package, "**/*.toml"), (PAGES, "*.py"), (CONFIGS, "*.json")):
        for file in sorted(folder.glob(pattern)):
            digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:8]


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that have to be the same on all ranks."""
    python = {"python": ".".join(map(str, sys.version_info[:3]))}
    return python | dict.fromkeys(software.NEEDED, "missing") | software.installed(software.NEEDED)


def network(address: str) -> tuple[str, int]:
    """Return the interface that has `address`, and its speed in megabits per second, 0 if unknown."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name, psutil.net_if_stats()[name].speed
    return "", 0


if __name__ == "__main__":
    print(json.dumps(collect(Path(sys.argv[1]), sys.argv[2], sys.argv[3])))
