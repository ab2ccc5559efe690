"""The GPUs, nodes and networks that people have."""

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches

from recipes.planning.instances import INSTANCES, Instance
from recipes.spec.errors import UserError
from recipes.spec.gpus import peak_flops

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One accelerator, by its maker's datasheet."""

    name: str
    memory_gib: float
    """What a program can allocate, before the driver's own: what torch calls the total, about 1 % below the name's."""
    memory_gbs: float
    """Memory bandwidth in GB/s."""
    link_gbs: float
    """To the other GPUs of a node, in GB/s and one direction: NVLink or Infinity Fabric; 0: only PCIe."""
    pcie_gbs: float
    """To the host, in GB/s and one direction."""
    units: int
    """Streaming multiprocessors (compute units of an MI300X), which matrix products are shared out to."""
    network_gbs: float
    """Network per GPU in GB/s and one direction, where nothing else is said: `_usual_network`."""
    source: str

    @property
    def bf16_tflops(self) -> float:
        """Dense matrix products, without sparsity (fp16 where it has no bf16): `spec.gpus`, which MFU uses too."""
        peak = peak_flops(self.name)
        assert peak is not None, self.name
        return peak / 1e12


_PCIE3, _PCIE4, _PCIE5 = 15.75, 31.5, 63.0  # GB/s in one direction over 16 lanes: PCI-SIG
_DGX_A100, _DGX_H100 = 25.0, 50.0  # DGX A100: a 200 Gb/s card per GPU; DGX H100, H200 and B200: 400 Gb/s
_CLOUD = 12.5 / 8  # AWS g5.48xlarge, g6.48xlarge: 100 Gb/s for 8 GPUs
_OFFICE = 1.25 / 4  # ten-gigabit Ethernet for 4 GPUs

GPUS = (
    Gpu("RTX 3090", 23.69, 936, 0, _PCIE4, 82, _OFFICE, "GA102 whitepaper; its NVLink bridge joins only pairs"),
    Gpu("RTX 4090", 23.65, 1008, 0, _PCIE4, 128, _OFFICE, "Ada whitepaper"),
    Gpu("RTX 5090", 31.37, 1792, 0, _PCIE5, 170, _OFFICE, "RTX Blackwell whitepaper"),
    Gpu("T4", 14.56, 300, 0, _PCIE3, 40, _CLOUD, "T4 datasheet"),
    Gpu("L4", 22.03, 300, 0, _PCIE4, 58, _CLOUD, "L4 datasheet"),
    Gpu("A10", 21.99, 600, 0, _PCIE4, 72, _CLOUD, "A10 datasheet"),
    Gpu("A10G", 21.99, 600, 0, _PCIE4, 80, _CLOUD, "A10G datasheet"),
    Gpu("L40S", 44.39, 864, 0, _PCIE4, 142, 6.25, "L40S datasheet; network: AWS g6e.48xlarge"),
    Gpu("A100 40GB", 39.39, 1555, 300, _PCIE4, 108, _DGX_A100, "A100 datasheet, SXM"),
    Gpu("A100 80GB", 79.14, 2039, 300, _PCIE4, 108, _DGX_A100, "A100 datasheet, SXM"),
    Gpu("A100 40GB PCIe", 39.39, 1555, 0, _PCIE4, 108, 2.5, "A100 datasheet; its bridge joins only pairs"),
    Gpu("A100 80GB PCIe", 79.14, 1935, 0, _PCIE4, 108, 2.5, "A100 datasheet; network: Azure NC96ads_A100_v4"),
    Gpu("H100", 79.10, 3350, 450, _PCIE5, 132, _DGX_H100, "H100 datasheet, SXM"),
    Gpu("H100 PCIe", 79.10, 2000, 0, _PCIE5, 114, 2.5, "H100 datasheet; its bridge joins only pairs"),
    Gpu("H200", 139.72, 4800, 450, _PCIE5, 132, _DGX_H100, "H200 datasheet, SXM"),
    Gpu("GH200", 94.50, 4000, 450, 450, 132, _DGX_H100, "GH200 datasheet, 96 GB; the host is reached over NVLink-C2C"),
    Gpu("B200", 178.35, 8000, 900, _PCIE5, 148, _DGX_H100, "DGX B200 datasheet"),
    Gpu("MI300X", 191.69, 5300, 448, _PCIE5, 304, 50.0, "MI300X datasheet; seven Infinity Fabric links"),
)


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal GPUs."""

    gpu: Gpu
    gpus_per_node: int = 1
    nodes: int = 1
    host_memory_gib: float = 0.0
    """Of one node; 0: unknown, so nothing is refused for it."""
    nvme_gib: float = 0.0
    """Of one node; 0: none."""
    nvme_gbs: float = 3.0
    """Reading or writing, one node's drives together."""
    network_gbs: float = 0.0
    """Of one node to the others, in GB/s and one direction, all cards together; 0: what is usual for the GPU."""
    cores: int = 0
    """Of one node's CPUs; 0: unknown."""

    @property
    def gpus(self) -> int:
        """Over all nodes."""
        return self.gpus_per_node * self.nodes

    @property
    def node_network_gbs(self) -> float:
        """Of one node to the others, known or usual."""
        return self.network_gbs or self.gpu.network_gbs * self.gpus_per_node


def find(name: str) -> Gpu:
    """Return a GPU by what people or `nvidia-smi -L` call it (`4090`, `a100-80gb`, `NVIDIA H100 80GB HBM3`).

    Raises:
        UserError: there is none, or there are several, of that name.
    """
    words = _words(name)
    within = [gpu for gpu in GPUS if _words(gpu.name) <= words]
    if within:
        return max(within, key=lambda gpu: len(_words(gpu.name)))
    around = [gpu for gpu in GPUS if words and words <= _words(gpu.name)]
    if len(around) == 1:
        return around[0]
    if around:
        raise UserError(f"--gpu {name}: which one? {_listed(gpu.name for gpu in around)}.")
    raise UserError(f"--gpu {name}: unknown; {_nearest(name)}.\nFor any other, give --gpu-memory GIB.")


def _words(name: str) -> frozenset[str]:
    """Return the words of a GPU's name: `RTX4090` and `a100-80g` as `rtx 4090` and `a100 80gb`."""
    text = re.sub(r"\brtx(?=\d)", "rtx ", re.sub(r"[^a-z0-9]+", " ", name.lower()))
    return frozenset(re.sub(r"\b(\d+)g\b", r"\1gb", text).split())


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _nearest(name: str) -> str:
    """Return the names most like `name`, of GPUs and of instances, or every GPU's where none is."""
    known = {known.lower(): known for known in [*(gpu.name for gpu in GPUS), *INSTANCES]}
    close = get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    return f"did you mean {_listed(known[match] for match in close)}?"[:-1] if close else _all()


def _all() -> str:
    return f"known are {_listed(gpu.name for gpu in GPUS)}"


def cluster(
    gpu: str | None = None,
    gpus: int | None = None,
    nodes: int = 1,
    gpu_memory: float | None = None,
    host_memory: float | None = None,
    nvme: float | None = None,
) -> Cluster:
    """Return what `plan.py`'s flags name.

    Args:
        gpu: a GPU or a cloud's instance (`H100`, `p5.48xlarge`); None: what this machine has, or `gpu_memory`.
        gpus: per node; None: all that the instance or this machine has, otherwise 1.
        nodes: equal ones.
        gpu_memory: in GiB, of a GPU that has no name here: its speed is taken to be that of the slowest like it.
        host_memory: of one node in GiB; None: the instance's, or unknown.
        nvme: of one node in GiB; None: the instance's, or none.

    Raises:
        UserError: the flags contradict each other, name nothing, or name more than there is.
    """
    for flag, value in (("--gpus", gpus), ("--nodes", nodes), ("--gpu-memory", gpu_memory)):
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{flag} {value:g}: must be above 0.")
    for flag, value in (("--host-memory", host_memory), ("--nvme", nvme)):
        if value is not None and not 0 <= value < math.inf:
            raise UserError(f"{flag} {value:g}: must be at least 0, in GiB.")
    if gpu is not None and gpu_memory is not None:
        raise UserError(f"--gpu {gpu} --gpu-memory {gpu_memory:g}: give one of them; a GPU's name says its memory.")
    node = _node(gpu, gpu_memory)
    if gpus is not None and gpu is not None and _instance(gpu) and gpus > node.gpus_per_node:
        raise UserError(f"--gpus {gpus}: {gpu} has {node.gpus_per_node} per node; add --nodes.")
    return replace(
        node,
        gpus_per_node=gpus or node.gpus_per_node,
        nodes=nodes,
        host_memory_gib=node.host_memory_gib if host_memory is None else host_memory,
        nvme_gib=node.nvme_gib if nvme is None else nvme,
    )


def _node(gpu: str | None, gpu_memory: float | None) -> Cluster:
    if gpu_memory is not None:
        return Cluster(with_memory(gpu_memory))
    if gpu is None:
        here = this_machine()
        if here is None:
            raise UserError(f"This machine has no GPU: give --gpu NAME or --gpu-memory GIB; {_all()}.")
        return here
    instance = _instance(gpu)
    if instance is None:
        return Cluster(find(gpu))
    return Cluster(
        find(instance.gpu),
        instance.gpus,
        host_memory_gib=instance.host_memory_gib,
        nvme_gib=instance.nvme_gib,
        network_gbs=instance.network_gbits / 8,
        cores=instance.cores,
    )


def _instance(name: str) -> Instance | None:
    known = {known.lower(): instance for known, instance in INSTANCES.items()}
    return known.get(name.lower().removeprefix("standard_"))


def with_memory(gib: float, name: str | None = None) -> Gpu:
    """Return a GPU that only its memory is known of: the slowest of those whose memory is nearest."""
    like = min(GPUS, key=lambda gpu: (round(abs(gpu.memory_gib - gib) / gib, 1), gpu.bf16_tflops))
    return replace(
        like, memory_gib=gib, source=f"{name or 'a GPU'} with {gib:g} GiB, taken to be as fast as {like.name}"
    )


def this_machine() -> Cluster | None:
    """Return the GPUs and the host that this is running on; None without a GPU, or without torch."""
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
        gpu = with_memory(gib, properties.name)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    return Cluster(gpu, torch.cuda.device_count(), host_memory_gib=host, cores=len(os.sched_getaffinity(0)))
