"""Free disk space and host memory, checked before a checkpoint is written."""

import contextlib
import os
import shutil
from pathlib import Path

from ..recipe.errors import UserError
from ..recipe.files import check_writable
from ..recipe.gpus import GIB


def check_disk(folder: Path, needed: int, what: str) -> None:
    """Check that the disk has space for `needed` bytes.

    Raises:
        UserError: it has not; the message gives the folder, the free and the needed space.
    """
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UserError(
            f"{folder}: {what} needs about {needed / GIB:.2f} GiB, but only {free / GIB:.2f} GiB is free.\n"
            "Free some space, choose another --output-dir, or save less often (save_steps=0 keeps only the export)."
        )


def check_cache() -> None:
    """Refuse a cache of datasets that cannot be written: every rank would fail there, after the model is loaded.

    Raises:
        UserError: names the environment variable that leads there.
    """
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
    return bytes_per_weight * (trainable if trainable < total else total) if stage == 3 else 0


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
    """Check that host memory has room for `needed` bytes.

    Raises:
        UserError: it has not; the message gives the free and the needed memory.
    """
    free = free_memory() if needed else 0
    if free < needed:
        raise UserError(
            f"{what} gathers {needed / GIB:.2f} GiB in host memory, but only {free / GIB:.2f} GiB is free.\n"
            "Free some memory, or save the weights only in DeepSpeed's own format: "
            "stage3_gather_16bit_weights_on_model_save=false."
        )
