"""The machines of a plan: equal nodes of equal GPUs, from the command line's flags or this machine."""

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...recipe.errors import UserError
from ...recipe.gpus import GIB
from . import machine_file
from .gpus import DESKTOP, DESKTOP_HOST, Gpu, all_names, find, with_memory
from .instances import INSTANCES, instance_name
from .machine_file import Machine


@dataclass(frozen=True)
class Correction:
    """A correction of predicted speeds, by past runs of one kind on this machine."""

    factor: float
    """The median of measured / predicted."""
    runs: int


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal GPUs."""

    gpu: Gpu
    gpus_per_node: int = 1
    nodes: int = 1
    host_memory_gib: float = 0.0
    """Host memory of one node; 0 if unknown, in which case it is not checked."""
    nvme_gib: float = 0.0
    """NVMe space of one node; 0 if it has none."""
    nvme_gbs: float = 3.0
    """Bandwidth of one node's drives together, for reading or writing."""
    network_gbs: float = 0.0
    """Bandwidth from one node to the others, in GB/s per direction, all cards together; 0 for the GPU's usual value."""
    cores: int = 0
    """CPU cores of one node; 0 if unknown."""
    instance: str = ""
    """The rented instance, a name in `instances.INSTANCES`, even if not all its GPUs are used; empty if unknown."""
    corrections: Mapping[str, Correction] = field(default_factory=dict)
    """By the kinds of `search.plans.kind_of`; empty without past runs."""
    machine: Machine | None = None
    """Measurements of one of its nodes, or None if only datasheets are known."""

    @property
    def gpus(self) -> int:
        """Number of GPUs over all nodes."""
        return self.gpus_per_node * self.nodes

    @property
    def on_cpus(self) -> bool:
        """True if the ranks are processes of a machine without GPUs."""
        return self.gpu.name == machine_file.CPU

    @property
    def node_network_gbs(self) -> float:
        """Bandwidth from one node to the others in GB/s, as given or the usual value."""
        return self.network_gbs or self.gpu.network_gbs * self.gpus_per_node


def cluster(
    gpu: str | None = None,
    gpus: int | None = None,
    nodes: int = 1,
    gpu_memory: float | None = None,
    host_memory: float | None = None,
    nvme: float | None = None,
) -> Cluster:
    """Return the cluster that `ds-recipes plan`'s flags describe; memory is in GiB, per node but for the GPU's.

    Without a name or a memory of the GPU it is this machine's. All GPUs of an instance or of this machine count,
    otherwise one; host memory is the instance's or a desktop computer's, otherwise unknown.
    """
    for flag, value in (("--gpus", gpus), ("--nodes", nodes), ("--gpu-memory", gpu_memory)):
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{flag} {value:g}: must be above 0.")
    for flag, value in (("--host-memory", host_memory), ("--nvme", nvme)):
        if value is not None and not 0 <= value < math.inf:
            raise UserError(f"{flag} {value:g}: must be at least 0, in GiB.")
    if gpu is not None and gpu_memory is not None:
        raise UserError(f"--gpu {gpu} --gpu-memory {gpu_memory:g}: give one of them; a GPU's name implies its memory.")
    instance, node = instance_name(gpu) if gpu else None, None
    if gpu_memory is not None:
        node = Cluster(with_memory(gpu_memory))
    elif instance:
        node = of_instance(instance)
    elif gpu is not None:
        # A number in the name: `8xH100`, `8 x H100`, `gpu_8x_l40s`, `h100x8`.
        before = re.match(r"(?:gpu[_ -])?(\d{1,2})\s*x[_ -]*(\w.*)", gpu, re.IGNORECASE)
        after = re.fullmatch(r"(.*\d)\s*x\s*(\d{1,2})", gpu, re.IGNORECASE)
        count, name = (before[1], before[2]) if before else (after[2], after[1]) if after else ("", "")
        if count:
            option = f"--gpu {name.replace(' ', '-')} --gpus {count}"
            raise UserError(f"--gpu {gpu}: give the number as a separate option: {option}.")
        node = Cluster(find(gpu))
    elif (node := this_machine()) is None:
        raise UserError(
            f"This machine has no GPU: give --gpu NAME or --gpu-memory GIB; {all_names()}.\n"
            "After ds-recipes doctor --measure, --gpu cpu plans for this machine's CPU ranks."
        )
    if gpus is not None and instance and gpus > node.gpus_per_node:
        raise UserError(f"--gpus {gpus}: {gpu} has {node.gpus_per_node} per node; add --nodes.")
    known = node.host_memory_gib or (DESKTOP_HOST if gpu is not None and node.gpu in DESKTOP else 0.0)
    return replace(
        node,
        gpus_per_node=gpus or node.gpus_per_node,
        nodes=nodes,
        host_memory_gib=known if host_memory is None else host_memory,
        nvme_gib=node.nvme_gib if nvme is None else nvme,
    )


def of_cpus(machine: Machine, ranks: int | None = None) -> Cluster:
    """Return CPU ranks of a machine without GPUs, with all their rates from its measurements."""
    ranks = ranks or machine.ranks
    machine = replace(machine, ranks=1, seconds=machine.alone) if ranks == 1 else machine
    memory, bf16 = machine.host_memory_gib / ranks, machine.product_rates("bf16")
    best = max(rate for _, rate in bf16 or machine.product_rates("fp32"))
    gpu = Gpu("CPU", memory, 1, 0, 1, 1, 0, bf16=bool(bf16), tflops=best / 1e12)
    return Cluster(machine.measured(gpu), ranks, host_memory_gib=machine.host_memory_gib, machine=machine)


def of_instance(name: str) -> Cluster:
    """Return one node of an instance, by its name in `instances.INSTANCES`."""
    instance = INSTANCES[name]
    return Cluster(
        find(instance.gpu),
        instance.gpus,
        host_memory_gib=instance.host_memory_gib,
        nvme_gib=instance.nvme_gib,
        network_gbs=instance.network_gbits / 8,
        cores=instance.cores,
        instance=name,
    )


def this_machine() -> Cluster | None:
    """Return the GPUs and the host of this machine, or None without a GPU or without torch."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    gib = properties.total_memory / GIB
    try:
        gpu = replace(find(properties.name), memory_gib=gib)
    except UserError:
        # NVIDIA's compute capability 8.0, Ampere, is the first with bf16.
        gpu = replace(with_memory(gib, properties.name), bf16=getattr(properties, "major", 8) >= 8)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    return Cluster(gpu, torch.cuda.device_count(), host_memory_gib=host, cores=len(os.sched_getaffinity(0)))


def with_measurements(
    cluster: Cluster, file: Path | None, elsewhere: bool, say: Callable[[str], None] = print
) -> Cluster:
    """Return the cluster with the measurements of one of its nodes in place of datasheets, if there are any.

    They are in `file`, or are this machine's own, which need not apply if the GPU is `elsewhere`, by its name. `say`
    receives the reason if a file is not used.
    """
    place = file or machine_file.default_file()
    if file is None and not place.exists():
        return cluster
    try:
        machine = machine_file.read(place)
    except UserError as error:
        say(f"{error} Datasheets are used instead.")
        return cluster
    if machine.has(cluster.gpu):
        nvme, network = machine.nvme_gbs or cluster.nvme_gbs, machine.network_gbs or cluster.network_gbs
        gpu = machine.measured(cluster.gpu)
        return replace(cluster, gpu=gpu, nvme_gbs=nvme, network_gbs=network, machine=machine)
    if file is not None or not (elsewhere or machine.device == machine_file.CPU):
        say(f"{place}: measured on {machine.device}, the plan is for {cluster.gpu.name}: datasheets are used instead.")
    return cluster
