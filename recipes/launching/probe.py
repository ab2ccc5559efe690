"""What one host says about itself before a run: `python -m recipes.launching.probe FOLDER FILE PEER` prints JSON."""

import hashlib
import json
import os
import shutil
import socket
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from recipes.machine import software
from recipes.machine.check import output
from recipes.spec.pages import ROOT

GIB = 2**30


def report(folder: Path, file: str, peer: str) -> dict[str, Any]:
    """Return the facts that have to agree between hosts, or to suffice on each.

    Args:
        folder: where the run's folder will be made.
        file: the name of a file that the launcher has put there.
        peer: the host that all ranks meet at; empty on that host itself.
    """
    gpus = (output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or "").splitlines()
    os.environ["DS_ACCELERATOR"] = "cuda" if gpus else "cpu"  # what `software.ops` looks for, without importing torch
    address = route_to(peer) if peer else own_address()
    interface, speed = network(address)
    return {
        "commit": output("git", "-C", str(ROOT), "rev-parse", "--short=9", "HEAD") or "",
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


def fingerprint(root: Path = ROOT) -> str:
    """Return a digest of the code and the configurations: two checkouts with the same one behave the same."""
    digest = hashlib.sha256()
    for pattern in ("recipes/**/*.py", "scripts/*.py", "configs/*.json"):
        for file in sorted(root.glob(pattern)):
            digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:8]


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that ranks have to agree on."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in software.NEEDED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def route_to(peer: str) -> str:
    """Return the address from which this host would speak to `peer`; empty without a route or a name for it."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
            route.connect((peer, 9))  # sends nothing: only asks the kernel for its route
            return route.getsockname()[0]
    except OSError:
        return ""


def own_address() -> str:
    """Return the address under which ssh has reached this host."""
    return (os.environ.get("SSH_CONNECTION", "").split() or [""] * 4)[2]


def network(address: str) -> tuple[str, int]:
    """Return the interface that has `address` and its speed in megabits per second, 0 where nobody says it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name, psutil.net_if_stats()[name].speed
    return "", 0


if __name__ == "__main__":
    print(json.dumps(report(Path(sys.argv[1]), sys.argv[2], sys.argv[3])))
