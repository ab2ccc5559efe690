"""Versions, compilers and DeepSpeed's ops."""

import fcntl
import os
import re
import shutil
import sys
import time
from importlib import metadata
from pathlib import Path

from recipes.machine.check import Check, output

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
NEEDED = ("torch", "deepspeed", "transformers", "accelerate", "peft", "trl", "datasets")
# What a run builds on its first use, by accelerator: class, name of the library, who needs it.
OPS = {
    "cpu": (
        ("CPUAdamBuilder", "cpu_adam", "optimizer offload"),
        ("FusedAdamBuilder", "fused_adam", "a DeepSpeed optimizer block"),
        ("ShareMemCommBuilder", "deepspeed_shm_comm", "several ranks on a CPU"),
        ("AsyncIOBuilder", "async_io", "NVMe offload"),
    ),
    "cuda": (
        ("FusedAdamBuilder", "fused_adam", "a DeepSpeed optimizer block"),
        ("CPUAdamBuilder", "cpu_adam", "optimizer offload"),
        ("AsyncIOBuilder", "async_io", "NVMe offload"),
    ),
}


def versions() -> list[Check]:
    """Compare installed packages with the set that is tested together (constraints.txt)."""
    pinned = dict(re.findall(r"^([\w.-]+)==([\w.+-]+)", CONSTRAINTS.read_text(), re.MULTILINE))
    return [_version(name, pinned.get(name)) for name in NEEDED]


def _version(name: str, tested: str | None) -> Check:
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Check(name, "error", "not installed", "pip install -r constraints.txt")
    if tested is None or found.split("+")[0] == tested.split("+")[0]:
        return Check(name, "ok", found)
    return Check(name, "warning", f"{found}; tested is {tested}", "pip install -r constraints.txt")


def accelerator() -> list[Check]:
    """Return what torch sees, and whether driver, CUDA and NCCL go together. Imports torch."""
    import torch

    driver = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if not torch.cuda.is_available():
        if driver is None:
            return [Check("GPU", "ok", "none: runs use CPU ranks over gloo")]
        built = torch.version.cuda or "no CUDA"
        fix = f"install a torch built for CUDA that driver {driver.splitlines()[0]} supports"
        return [Check("GPU", "error", f"nvidia-smi sees one, torch ({built}) does not", fix)]
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return [
        Check("GPU", "ok", f"{torch.cuda.device_count()} x {', '.join(sorted(names))}"),
        Check("driver", "ok", (driver or "unknown").splitlines()[0]),
        Check("CUDA of torch", "ok", f"{torch.version.cuda}, NCCL {nccl}"),
        _nvcc(torch.version.cuda or ""),
    ]


def _nvcc(wanted: str) -> Check:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    text = output(shutil.which("nvcc") or f"{home}/bin/nvcc", "--version")
    found = re.search(r"release (\d+\.\d+)", text or "")
    if not found:
        fix = f"install the CUDA {wanted} toolkit, or do without fused and quantised ops"
        return Check("nvcc", "warning", "not found: CUDA ops cannot be built", fix)
    if found[1].split(".")[0] != wanted.split(".")[0]:
        fix = f"point CUDA_HOME to a CUDA {wanted} toolkit"
        return Check("nvcc", "error", f"{found[1]}, torch was built with {wanted}: ops do not build", fix)
    return Check("nvcc", "ok", found[1])


def compilers() -> list[Check]:
    """Look for what builds DeepSpeed's ops."""
    checks = []
    for name, fix in (("g++", "apt-get install g++"), ("ninja", "pip install ninja")):
        found = shutil.which(name) or (name == "ninja" and _beside_python("ninja"))
        text = output(str(found), "--version") if found else None
        state = "ok" if text else "error"
        what = text.splitlines()[0] if text else "not found: offload cannot build CPU Adam"
        checks.append(Check(name, state, what, "" if text else fix))
    header = any(Path(folder, "libaio.h").exists() for folder in ("/usr/include", "/usr/local/include"))
    fix = "" if header else "apt-get install libaio-dev"
    found = "header found" if header else "no libaio.h: NVMe offload does not build"
    checks.append(Check("libaio", "ok" if header else "warning", found, fix))
    return checks


def _beside_python(name: str) -> str | None:
    import sys

    path = Path(sys.executable).with_name(name)
    return str(path) if path.exists() else None


def extensions_folder() -> Path:
    """Return where torch keeps built ops; the scripts set the variable to the environment's own folder."""
    kept = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(kept) if kept else Path.home() / ".cache" / "torch_extensions"


def kind() -> str:
    """Return which accelerator's ops count here. Imports torch."""
    import torch

    wanted = os.environ.get("DS_ACCELERATOR")
    return wanted if wanted in OPS else "cuda" if torch.cuda.is_available() else "cpu"


def ops() -> list[Check]:
    """Say which ops are built; the first run that needs a missing one builds it, in every rank at once."""
    checks = []
    for _, name, purpose in OPS[kind()]:
        # TORCH_EXTENSIONS_DIR is used as it is; the default folder has one more level, for Python's version.
        libraries = (f"{name}/{name}.so", f"*/{name}/{name}.so")
        built = any(any(extensions_folder().glob(pattern)) for pattern in libraries) or _installed(name)
        state = "ok" if built else "warning"
        found = f"built ({purpose})" if built else f"not built ({purpose}): the first run takes minutes longer"
        checks.append(Check(f"op {name}", state, found, "" if built else "scripts/doctor.py --build"))
    return checks


def _installed(name: str) -> bool:
    """Return whether DeepSpeed was installed with this op (DS_BUILD_OPS)."""
    try:
        folder = metadata.distribution("deepspeed").locate_file("deepspeed/ops")
    except metadata.PackageNotFoundError:
        return False
    return any(Path(str(folder)).rglob(f"{name}_op*.so"))


def build() -> list[Check]:
    """Build the ops once, under a lock: two builds of one op at a time leave a broken library."""
    os.environ.setdefault("DS_ACCELERATOR", kind())
    folder = extensions_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".doctor.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another build is running; waiting for it to end", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        return [_build(builder, name) for builder, name, _ in OPS[kind()]]


def _build(builder: str, name: str) -> Check:
    from deepspeed.accelerator import get_accelerator

    started = time.monotonic()
    try:
        get_accelerator().create_op_builder(builder).load(verbose=False)
    except Exception as error:  # a build fails in any way a compiler can
        lines = [line for line in str(error).splitlines() if "error" in line.lower()] or [str(error)]
        return Check(f"build {name}", "error", lines[0][:200], "see g++, ninja, libaio and nvcc above")
    return Check(f"build {name}", "ok", f"{time.monotonic() - started:.0f} s")
