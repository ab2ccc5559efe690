"""Memory and disks: the free space that a checkpoint needs, and the checks of `ds-recipes doctor`; logins, too."""

import contextlib
import mmap
import os
import platform
import resource
import shutil
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..recipe.errors import UserError
from ..recipe.files import check_writable
from ..recipe.gpus import GIB

_BLOCK = 8 * 2**20  # bytes per request; drives reach full speed from about 1 MiB


@dataclass(frozen=True)
class Check:
    """The result of one check: a line of the doctor's table."""

    name: str
    state: Literal["ok", "warning", "error", "unknown"]
    """`error` stops every run; `warning` stops or slows down some runs."""
    found: str
    fix: str = ""


def output(*command: str, timeout: float = 20) -> str | None:
    """Return a command's output, or None if the command is missing, fails, or takes too long."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()


def cpu_flags() -> frozenset[str]:
    """Return the features of this machine's processor, by Linux's names; empty if they are unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(
        next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    )


def computes_bf16() -> bool:
    """Return whether CPU ranks compute bf16 at the speed of fp32 at least; otherwise oneDNN has no kernels for it.

    As `mkldnn_bf16_device_check` of torch 2.13 on x86; of other processors nothing is known.
    """
    return platform.machine() != "x86_64" or bool(cpu_flags() & {"avx512bw", "avx_ne_convert"})


def memory() -> list[Check]:
    """Check the size of /dev/shm and the limit of locked memory."""
    checks = []
    try:
        size = shutil.disk_usage("/dev/shm").total
        small = size < GIB
        found = f"{size / GIB:.1f} GiB"
        fix = "docker run --shm-size=8g (or --ipc=host)" if small else ""
        checks.append(Check("/dev/shm", "error" if size < 2**27 else "warning" if small else "ok", found, fix))
    except OSError:
        checks.append(Check("/dev/shm", "warning", "missing; NCCL and data loader workers need it"))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= 8 * GIB:
        found = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / GIB:.0f} GiB"
        return [*checks, Check("locked memory", "ok", found)]
    fix = "ulimit -l unlimited (docker: --ulimit memlock=-1), or set pin_memory to false"
    found = f"limited to {soft / GIB:.2f} GiB; offload pins its buffers"
    return [*checks, Check("locked memory", "warning", found, fix)]


def disk(folder: Path, checkpoint_gib: float | None) -> Check:
    """Compare the free space with the size of a checkpoint."""
    try:
        existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    except OSError as error:
        return Check("disk", "error", f"{folder}: {error.strerror}", "choose another --output-dir")
    if not existing.is_dir():
        return Check("disk", "error", f"{existing}: a file, not a folder", "choose another --output-dir")
    free = shutil.disk_usage(existing).free / GIB
    found = f"{free:.0f} GiB free at {existing}"
    if checkpoint_gib is None:
        return Check("disk", "error" if free < 1 else "ok", found, "" if free >= 1 else "free some space")
    if free < checkpoint_gib:
        fix = "choose another --output-dir, or keep fewer checkpoints"
        return Check("disk", "error", f"{found}; a checkpoint takes {checkpoint_gib:g} GiB", fix)
    return Check("disk", "ok", f"{found}; enough for {int(free // checkpoint_gib)} checkpoints")


def nvme(folder: Path, megabytes: int = 256) -> list[Check]:
    """Measure the speed of writing and reading a file with direct I/O, which DeepSpeed's aio op uses."""
    try:
        speeds = drive_speed(folder, megabytes)
    except OSError as error:
        fix = "choose a writable folder on a local drive (tmpfs has no direct I/O)"
        return [Check("NVMe", "error", f"{folder}: {error.strerror}", fix)]
    checks = []
    for name, speed in zip(("NVMe write", "NVMe read"), speeds, strict=True):
        # A step moves 16 bytes per parameter and rank each way: at 1 GB/s, 16 s per billion parameters.
        slow = speed < 1
        fix = "use a local NVMe drive; a step moves about 16 bytes per parameter each way" if slow else ""
        checks.append(Check(name, "warning" if slow else "ok", f"{speed:.2f} GB/s", fix))
    return checks


def drive_speed(folder: Path, megabytes: int = 256) -> tuple[float, float]:
    """Return the GB/s at which a file in a folder is written and read with direct I/O; OSError without direct I/O."""
    file = folder / f".doctor-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _transfer(file, megabytes, os.O_WRONLY | os.O_CREAT), _transfer(file, megabytes, os.O_RDONLY)
    finally:
        file.unlink(missing_ok=True)


def _transfer(file: Path, megabytes: int, flags: int) -> float:
    """Return GB/s."""
    count = max(1, megabytes * 2**20 // _BLOCK)
    descriptor = os.open(file, flags | os.O_DIRECT, 0o600)
    try:
        with mmap.mmap(-1, _BLOCK) as block:  # direct I/O needs page-aligned memory
            started = time.monotonic()
            for _ in range(count):
                if flags & os.O_WRONLY:
                    os.write(descriptor, block)
                else:
                    os.readv(descriptor, [block])
            os.fsync(descriptor)
            return count * _BLOCK / (time.monotonic() - started) / 1e9
    finally:
        os.close(descriptor)


def hosts(names: Iterable[str]) -> list[Check]:
    """Log in to each host without a password."""
    pdsh = shutil.which("pdsh")
    fix = "" if pdsh else "apt-get install pdsh"
    found = pdsh or "not found; DeepSpeed's launcher needs it for several hosts"
    checks = [Check("pdsh", "ok" if pdsh else "error", found, fix)]
    for name in names:
        if output("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", name, "true", timeout=15) is None:
            fix = f"ssh-copy-id {name}"
            checks.append(Check(f"ssh {name}", "error", "cannot log in without a password", fix))
        else:
            checks.append(Check(f"ssh {name}", "ok", "reached"))
    return checks


def tracking() -> Check:
    """Report whether W&B would log online or offline. The key itself is never read."""
    mode = os.environ.get("WANDB_MODE", "")
    if mode in ("offline", "disabled"):
        return Check("W&B", "ok", f"{mode} (WANDB_MODE)")
    netrc = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    try:
        known = "WANDB_API_KEY" in os.environ or (netrc.exists() and "api.wandb.ai" in netrc.read_text())
    except OSError:
        known = False
    return Check("W&B", "ok", "a key is set; runs are logged online" if known else "no key; runs are logged offline")


def check_disk(folder: Path, needed: int, what: str) -> None:
    """Refuse a disk that lacks space for `needed` bytes of `what`."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        unit, size = ("GiB", GIB) if needed >= GIB / 10 else ("MiB", 2**20)
        raise UserError(
            f"{folder}: {what} needs about {needed / size:.2f} {unit}, but only {free / size:.2f} {unit} is free.\n"
            "Free some space, choose another --output-dir, or save less often (save_steps=0 keeps only the export)."
        )


def check_cache() -> None:
    """Refuse a cache of datasets that cannot be written: every rank would fail there, after the model is loaded."""
    places = {
        "HF_DATASETS_CACHE": "",
        "HF_HOME": "datasets",
        "XDG_CACHE_HOME": "huggingface/datasets",
        "HOME": ".cache/huggingface/datasets",
    }
    name = next((name for name in places if os.environ.get(name)), None)
    if name is not None:
        given = os.environ[name]
        try:
            check_writable(name, Path(os.path.expanduser(given), places[name]), folder=True)
        except UserError as error:
            raise UserError(
                f"{error}\n{name}={given} leads there: set it to a folder that you may write to."
            ) from error


def gathered_bytes(total: int, trainable: int, bytes_per_weight: int, stage: int) -> int:
    """Return the bytes of host memory in which rank 0 gathers the trained weights for a checkpoint under ZeRO-3."""
    return bytes_per_weight * min(trainable, total) if stage == 3 else 0


def free_memory() -> int:
    """Return the bytes of host memory that are available without swapping, on the machine or in this container."""
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(meminfo["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError, KeyError):  # no cgroup of version 2, or no limit ("max")
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(cached["inactive_file"]))
    return free


def check_memory(needed: int, what: str) -> None:
    """Refuse a host whose memory lacks room for `needed` bytes of `what`."""
    free = free_memory() if needed else 0
    if free < needed:
        raise UserError(
            f"{what} gathers {needed / GIB:.2f} GiB in host memory, but only {free / GIB:.2f} GiB is free.\n"
            "Free some memory, or save the weights only in DeepSpeed's own format: "
            "stage3_gather_16bit_weights_on_model_save=false."
        )
