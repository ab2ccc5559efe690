"""The software of this machine: versions, the accelerator, compilers and DeepSpeed's ops, and what old versions lack.

tests/stacks has the environments at both ends of the supported ranges and one in between;
`.github/workflows/nightly.yml` tests them.
"""

import contextlib
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ..recipe.project import CONSTRAINTS, command
from . import ops as built_ops
from .system import Check, output

RANGES = {
    "python": ("3.11", "3.13"),
    "torch": ("2.9", "2.13"),
    "deepspeed": ("0.19.0", "0.19.8"),
    "transformers": ("5.10", "5.22"),
    "accelerate": ("1.13", "1.15"),
    "peft": ("0.20", "0.21"),
    "trl": ("1.16", "1.16"),
    "datasets": ("5.2", "5.2"),
}
"""The oldest and the newest tested release of each package; a later patch of the newest counts as tested."""

LAYOUTS = {
    "pipeline": ("0.19.3", "divides gradients by the accumulation once per stage"),
    "tensor": ("0.19.6", "exports other weights than it trains"),
    "expert": ("0.19.7", "does not start with the parameter groups of experts, if it has AutoEP at all"),
}
"""The first DeepSpeed that trains and exports a layout like plain PyTorch, and the defect of older versions.

Measured by `doctor --prove` with 0.19.0, 0.19.3, 0.19.6, 0.19.7 and 0.19.8, and read in the sources of the others.
"""


@dataclass(frozen=True)
class Lack:
    """A feature that a package lacks before a version."""

    package: str
    before: str
    what: str
    since: str = "0"
    """The first version to which this entry applies; older versions have an entry of their own."""


LACKS = (
    Lack("torch", "2.10", "no variable-length attention kernel: packed sequences take FlexAttention"),
    Lack("torch", "2.11", "no sliding windows in the variable-length kernel: such models take FlexAttention", "2.10"),
    Lack(
        "torch",
        "2.13",
        "shared keys and values are repeated for the variable-length kernel, which takes memory",
        "2.11",
    ),
    *(Lack("deepspeed", first, f"layout.{key} is refused, since it {why}") for key, (first, why) in LAYOUTS.items()),
    Lack("deepspeed", "0.19.4", "the linter does not report keys that DeepSpeed has removed"),
    Lack("deepspeed", "0.19.8", "tensor parallelism is refused for models whose plan splits whole inputs"),
    Lack("transformers", "5.14", "nemotron_h's configurations cannot be read"),
    Lack(
        "transformers",
        "5.17",
        "training with pictures is refused where the processor does not report their placeholder text",
    ),
    Lack("transformers", "5.20", "conversations in which somebody wrote a control token are refused"),
)


def numbers(version: str) -> tuple[int, ...]:
    """Return a version's numbers: (2, 9, 1) for 2.9.1+cpu."""
    return tuple(int(number) for number in re.split(r"[^\d.]", version)[0].strip(".").split("."))


NEEDED = ("torch", "deepspeed", "transformers", "accelerate", "peft", "trl", "datasets")


def installed(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    found = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def versions() -> list[Check]:
    """Compare the installed packages with the pinned versions (constraints.txt) and the ranges that are tested."""
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE))
    fix = f"pip install -r {CONSTRAINTS}"
    checks = [_judged("python", platform.python_version(), None, "install a Python of that range")]
    here = installed(NEEDED)
    for name in NEEDED:
        missing = Check(name, "error", "not installed", fix)
        checks.append(_judged(name, here[name], pinned.get(name), fix) if name in here else missing)
    return checks


def _judged(name: str, found: str, pinned: str | None, fix: str) -> Check:
    """Judge a version: `ok` is the pinned version, and any version of the tested range that lacks nothing."""
    if pinned is not None and found.split("+")[0] == pinned.split("+")[0]:
        return Check(name, "ok", found)
    oldest, newest = RANGES[name]
    version, last = numbers(found), numbers(newest)
    if not numbers(oldest) <= version or version[: len(last)] > last:
        return Check(name, "warning", f"{found} is outside the tested range, {oldest} to {newest}", fix)
    known = [lack for lack in LACKS if lack.package == name]
    if lacks := [lack.what for lack in known if numbers(lack.since) <= version < numbers(lack.before)]:
        return Check(name, "warning", f"{found}, of the tested range {oldest} to {newest}; {'; '.join(lacks)}", fix)
    return Check(name, "ok", f"{found}, of the tested range {oldest} to {newest}")


def accelerator() -> list[Check]:
    """Report the accelerator that torch finds, and whether driver, CUDA and NCCL match. Imports torch."""
    import torch

    driver = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if not torch.cuda.is_available():
        if driver is None:
            return [Check("GPU", "ok", "none; runs use CPU ranks over gloo")]
        built = torch.version.cuda or "no CUDA"
        fix = f"install a torch built for CUDA that driver {driver.splitlines()[0]} supports"
        return [Check("GPU", "error", f"nvidia-smi lists a GPU, torch ({built}) does not", fix)]
    wanted, home = torch.version.cuda or "", os.environ.get("CUDA_HOME", "/usr/local/cuda")
    text = output(shutil.which("nvcc") or f"{home}/bin/nvcc", "--version")
    if not (found := re.search(r"release (\d+\.\d+)", text or "")):
        fix = f"install the CUDA {wanted} toolkit, or avoid fused and quantised ops"
        nvcc = Check("nvcc", "warning", "not found; CUDA ops cannot be built", fix)
    elif found[1].split(".")[0] != wanted.split(".")[0]:
        fix = f"point CUDA_HOME to a CUDA {wanted} toolkit"
        nvcc = Check("nvcc", "error", f"{found[1]}, but torch was built with {wanted}; ops cannot be built", fix)
    else:
        nvcc = Check("nvcc", "ok", found[1])
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return [
        Check("GPU", "ok", f"{torch.cuda.device_count()} x {', '.join(sorted(names))}"),
        Check("driver", "ok", (driver or "unknown").splitlines()[0]),
        Check("CUDA of torch", "ok", f"{torch.version.cuda}, NCCL {nccl}"),
        nvcc,
    ]


def compilers() -> list[Check]:
    """Check for the tools that build DeepSpeed's ops."""
    checks = []
    for name, fix in (("g++", "apt-get install g++"), ("ninja", "pip install ninja")):
        beside_python = Path(sys.executable).with_name("ninja")
        found = shutil.which(name) or (name == "ninja" and beside_python.exists() and str(beside_python))
        text = output(str(found), "--version") if found else None
        what = text.splitlines()[0] if text else "not found; CPU Adam, which offload needs, cannot be built"
        checks.append(Check(name, "ok" if text else "error", what, "" if text else fix))
    header = built_ops.has_libaio()
    fix = "" if header else "apt-get install libaio-dev"
    found = "header found" if header else "no libaio.h; NVMe offload cannot be built"
    checks.append(Check("libaio", "ok" if header else "warning", found, fix))
    return checks


def ops() -> list[Check]:
    """Report which ops are built; the first run that needs a missing one builds it."""
    checks = []
    for op in built_ops.OPS[built_ops.kind()]:
        if not built_ops.missing([op]):
            checks.append(Check(f"op {op.name}", "ok", f"built ({op.purpose})"))
            continue
        found = f"not built ({op.purpose}); the first run that needs it builds it"
        checks.append(Check(f"op {op.name}", "warning", found, f"{command('doctor')} --build"))
    return checks


def build() -> list[Check]:
    """Build all ops that runs on this machine may need, one after the other."""
    accelerator = built_ops.kind()
    os.environ.setdefault("DS_ACCELERATOR", accelerator)
    checks = []
    for op in built_ops.OPS[accelerator]:
        name, started = f"build {op.name}", time.monotonic()
        try:
            with built_ops.lock(op.name):
                built_ops.load(op)
            checks.append(Check(name, "ok", f"{time.monotonic() - started:.0f} s"))
        except Exception as error:  # a compiler can fail in any way
            checks.append(Check(name, "error", built_ops.why(error), "see g++, ninja, libaio and nvcc above"))
    return checks
