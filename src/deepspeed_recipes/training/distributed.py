"""Starts and describes the ranks of a run; they start first, because ZeRO-3 shards the model while it is loaded."""

import os
import sys
from collections.abc import Callable
from datetime import timedelta

import datasets
import deepspeed
import torch
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator

from ..machine import readings
from ..recipe import layout as layouts
from ..recipe.errors import UserError
from ..recipe.recipe import Layout
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
    """Run a check on rank 0 and let every rank refuse what it refuses; a collective.

    Otherwise the others would fail in their next collective, and their tracebacks would bury the reason.

    Raises:
        UserError: on rank 0 with the check's message.
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
