"""Describes a run's environment: versions, hardware, the project's commit; never values of environment variables."""

import contextlib
import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import psutil
import torch
import torch.distributed as dist

from ..recipe.files import Json
from ..recipe.project import PACKAGE

PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "peft", "trl", "datasets", "wandb", "deepspeed-recipes")


def describe() -> Json:
    """Return the facts that must accompany a measurement."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "packages": versions(PACKAGES),
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "cpu": platform.processor() or platform.machine(),
        "cpu_count": os.cpu_count(),
        "host_memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "world_size": dist.get_world_size() if dist.is_initialized() else 1,
        "backend": dist.get_backend() if dist.is_initialized() else None,
        "git_commit": git_commit(),
    }


def versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed: a run without tracking needs no tracker."""
    found = {}
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def git_commit() -> str | None:
    """Return the checkout's commit, with `+changes` if files differ from it, or None without a checkout or git."""
    try:
        _git("ls-files", "--error-unmatch", __file__)  # otherwise it is the repository around an environment
        commit = _git("rev-parse", "HEAD")
        return commit + ("+changes" if _git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=PACKAGE, capture_output=True, text=True, check=True).stdout.strip()
