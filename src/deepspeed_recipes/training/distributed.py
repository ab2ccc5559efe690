"""Starts and describes the ranks of a run; they start first, because ZeRO-3 shards the model while it is loaded."""

import contextlib
import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib import metadata
from typing import Any

import datasets
import deepspeed
import psutil
import torch
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator

from ..machine import readings, software
from ..recipe import layout as layouts
from ..recipe.compatibility import Case, refusal
from ..recipe.deepspeed_file import DeepSpeedFile
from ..recipe.errors import UserError
from ..recipe.files import Json
from ..recipe.project import PACKAGE
from ..recipe.recipe import Layout, Recipe
from . import upstream

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""DeepSpeed's default, 10 minutes, is too short for a large checkpoint or a first tokenisation."""


def start() -> None:
    """Join the other ranks (NCCL on GPUs, gloo on CPU) and claim this rank's device."""
    if on_gpu():
        get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    upstream.meet_apart_from_earlier_attempts(COLLECTIVE_TIMEOUT)
    upstream.leave_out_shared_memory()
    deepspeed.init_distributed(timeout=COLLECTIVE_TIMEOUT, verbose=False)
    if not is_first() or not sys.stdout.isatty():
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()


def keep_near_gpu() -> frozenset[int]:
    """Keep this rank's threads on the cores of its GPU's NUMA node if there are several, and return these cores."""
    if not on_gpu() or not torch.cuda.is_available():
        return frozenset()
    devices = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    gpus = [f"{one.pci_domain_id:04x}:{one.pci_bus_id:02x}:{one.pci_device_id:02x}.0" for one in devices]
    cores = readings.cores_near(torch.cuda.current_device(), gpus, torch.get_num_threads())
    if cores:
        readings.bind(cores)
    return cores


def stop() -> None:
    """Leave the process group, so that no rank waits at exit."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def on_gpu() -> bool:
    """Return whether this run computes on GPUs."""
    return get_accelerator().device_name() != "cpu"


def check_installed(recipe: Recipe, file: DeepSpeedFile) -> None:
    """Refuse what the installed packages lack and what this machine's processors cannot compute.

    DeepSpeed would find it while it loads the model or later, or train or export something else.
    """
    installed = metadata.version("deepspeed")
    for layout, (first, why) in software.LAYOUTS.items():
        if (size := getattr(recipe.layout, layout)) > 1 and software.numbers(installed) < software.numbers(first):
            raise refusal("old DeepSpeed", key=layout, size=size, installed=installed, why=why, first=first)
    if recipe.optimizer == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError("optimizer=adamw_8bit: bitsandbytes is not installed; pip install bitsandbytes.")
    if recipe.precision == "fp16" and not get_accelerator().is_fp16_supported():
        raise refusal("no fp16 here")
    # DeepSpeed has kernels for these on GPUs only.
    for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"):
        if not on_gpu() and Case(recipe, file).value(f"file.zero_optimization.{key}") is True:
            raise refusal("no GPU here", name=file.name, key=key)


def device() -> torch.device:
    """Return this rank's device."""
    return torch.device(get_accelerator().current_device_name())


def gpu_uuid() -> str | None:
    """Return the UUID of this rank's GPU in NVIDIA's notation, or None without an NVIDIA GPU."""
    if not on_gpu() or not torch.cuda.is_available() or torch.version.hip:
        return None
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def is_first() -> bool:
    """Return whether this is rank 0, or a process without ranks: only these print and write."""
    return not dist.is_initialized() or dist.get_rank() == 0


def place(layout: Layout) -> layouts.RankPosition:
    """Return this rank's position in the layout."""
    return layouts.rank_position(layout, dist.get_rank(), dist.get_world_size())


def check_on_first(check: Callable[[], None]) -> None:
    """Run a check on rank 0 and let every rank refuse what it refuses, with its message; a collective.

    Otherwise the others would fail in their next collective, and their tracebacks would bury the reason.
    """
    message = None
    if is_first():
        try:
            check()
        except UserError as error:
            message = str(error)
    if total(float(message is not None))[0]:
        raise UserError(message or "refused by rank 0")


def total(*values: float) -> list[float]:
    """Return the sums of `values` over all ranks (a collective: every rank must call it)."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device())
    dist.all_reduce(tensor)
    return tensor.tolist()


def of_first(compute: Callable[[], Any]) -> Any:
    """Return what rank 0 computes; a collective."""
    found = [compute() if is_first() else None]
    dist.broadcast_object_list(found)
    return found[0]


def of_all(mine: object) -> list[Any]:
    """Return the objects of all ranks, in the order of the ranks; a collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def items_of_all(mine: Sequence[Any]) -> list[Any]:
    """Return the items of all ranks, in the order of the ranks; a collective."""
    return [item for items in of_all(list(mine)) for item in items]


def gathered(own: torch.Tensor, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    """Return the tensors, all of one shape, of a group's ranks or of all, in their order; a collective."""
    own = own.contiguous()
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    return found


PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "peft", "trl", "datasets", "wandb", "deepspeed-recipes")


def describe_environment() -> Json:
    """Return the facts that must accompany a measurement.

    `git_commit` has `+changes` if files differ from it, and is None without a checkout or git.
    """
    git = partial(subprocess.run, cwd=PACKAGE, capture_output=True, text=True, check=True)
    commit = None
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        git(["git", "ls-files", "--error-unmatch", __file__])  # otherwise it is the repository around an environment
        changes = git(["git", "status", "--porcelain"]).stdout.strip()
        commit = git(["git", "rev-parse", "HEAD"]).stdout.strip() + ("+changes" if changes else "")
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "packages": software.installed(PACKAGES),
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "cpu": platform.processor() or platform.machine(),
        "cpu_count": os.cpu_count(),
        "host_memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "world_size": dist.get_world_size() if dist.is_initialized() else 1,
        "backend": dist.get_backend() if dist.is_initialized() else None,
        "git_commit": commit,
    }
