"""The planner's catalogue of GPUs, from their makers' datasheets, with look-up by name or by memory."""

import re
from dataclasses import dataclass, replace
from difflib import get_close_matches

from ...recipe.errors import UserError
from ...recipe.gpus import peak_flops
from .instances import INSTANCES


@dataclass(frozen=True)
class Gpu:
    """One accelerator, as in its maker's datasheet."""

    name: str
    memory_gib: float
    """Memory that a program can allocate, before the driver's own use: torch's total, about 1 % below the name's."""
    memory_gbs: float
    """Memory bandwidth in GB/s."""
    link_gbs: float
    """Bandwidth to the other GPUs of a node over NVLink or Infinity Fabric, in GB/s per direction; 0 with PCIe only."""
    pcie_gbs: float
    """Bandwidth to the host, in GB/s per direction."""
    units: int
    """Streaming multiprocessors (compute units of an MI300X), over which a matrix product is spread."""
    network_gbs: float
    """Network bandwidth per GPU in GB/s per direction, as in usual machines. The user may give another value."""
    source: str
    bf16: bool = True
    """False for NVIDIA's GPUs before Ampere, which only support fp16."""
    like: str = ""
    """For a GPU of which only the memory is known: the GPU in `GPUS` whose speed is assumed."""
    tflops: float = 0.0
    """The peak, if `recipe.gpus` does not have it: that of the processes of a CPU is measured."""

    @property
    def bf16_tflops(self) -> float:
        """Peak of dense matrix products, from `recipe.gpus` as for MFU. It is fp16's peak if bf16 is not supported."""
        if self.tflops:
            return self.tflops
        peak = peak_flops(self.like or self.name)
        assert peak is not None, self.name
        return peak / 1e12


_PCIE3, _PCIE4, _PCIE5 = 15.75, 31.5, 63.0  # GB/s in one direction over 16 lanes: PCI-SIG
_DGX_A100, _DGX_H100 = 25.0, 50.0  # DGX A100: a 200 Gb/s card per GPU; DGX H100, H200 and B200: 400 Gb/s
_CLOUD = 12.5 / 8  # AWS p3dn.24xlarge, g5.48xlarge, g6.48xlarge: 100 Gb/s for 8 GPUs
_OFFICE = 1.25 / 4  # ten-gigabit Ethernet for 4 GPUs

_GEFORCE = (
    Gpu("RTX 2080 Ti", 10.75, 616, 0, _PCIE3, 68, _OFFICE, "Turing whitepaper; its bridge joins only pairs", False),
    Gpu("RTX 3060", 11.76, 360, 0, _PCIE4, 28, _OFFICE, "GeForce specifications, 12 GB; rates: GA102 whitepaper's"),
    Gpu("RTX 3080", 9.76, 760, 0, _PCIE4, 68, _OFFICE, "GA102 whitepaper, 10 GB"),
    Gpu("RTX 3090", 23.69, 936, 0, _PCIE4, 82, _OFFICE, "GA102 whitepaper; its NVLink bridge joins only pairs"),
    Gpu("RTX 3090 Ti", 23.68, 1008, 0, _PCIE4, 84, _OFFICE, "GeForce specifications; its bridge joins only pairs"),
    Gpu("RTX 4060", 7.75, 272, 0, _PCIE3, 24, _OFFICE, "GeForce specifications; 8 lanes of PCIe 4"),
    Gpu("RTX 4060 Ti 16GB", 15.6, 288, 0, _PCIE3, 34, _OFFICE, "GeForce specifications; 8 lanes of PCIe 4"),
    Gpu("RTX 4070", 11.7, 504, 0, _PCIE4, 46, _OFFICE, "GeForce specifications"),
    Gpu("RTX 4080", 15.7, 717, 0, _PCIE4, 76, _OFFICE, "Ada whitepaper"),
    Gpu("RTX 4090", 23.65, 1008, 0, _PCIE4, 128, _OFFICE, "Ada whitepaper"),
    Gpu("RTX 5090", 31.37, 1792, 0, _PCIE5, 170, _OFFICE, "RTX Blackwell whitepaper"),
)
_WORKSTATION = (
    Gpu("A5000", 23.68, 768, 0, _PCIE4, 64, _OFFICE, "RTX A5000 datasheet; its NVLink bridge joins only pairs"),
    Gpu("A6000", 47.43, 768, 0, _PCIE4, 84, _OFFICE, "RTX A6000 datasheet; its NVLink bridge joins only pairs"),
    Gpu("RTX 6000 Ada", 47.4, 960, 0, _PCIE4, 142, _OFFICE, "RTX 6000 Ada Generation datasheet"),
    Gpu("RTX PRO 6000", 94.97, 1792, 0, _PCIE5, 188, 6.25, "RTX PRO 6000 Blackwell datasheet; network: g7e.48xlarge"),
)
_DATA_CENTRE = (
    Gpu("T4", 14.56, 300, 0, _PCIE3, 40, _CLOUD, "T4 datasheet", False),
    Gpu("V100 16GB", 15.77, 900, 150, _PCIE3, 80, _CLOUD, "V100 datasheet, SXM2; AWS on p3, 2017", False),
    Gpu("V100 32GB", 31.74, 900, 150, _PCIE3, 80, _CLOUD, "V100 datasheet, SXM2", False),
    Gpu("L4", 22.03, 300, 0, _PCIE4, 58, _CLOUD, "L4 datasheet"),
    Gpu("A10", 21.99, 600, 0, _PCIE4, 72, _CLOUD, "A10 datasheet"),
    Gpu("A10G", 21.99, 600, 0, _PCIE4, 80, _CLOUD, "A10G datasheet"),
    Gpu("A30", 23.5, 933, 0, _PCIE4, 56, _CLOUD, "A30 datasheet; its bridge joins only pairs"),
    Gpu("L40", 44.39, 864, 0, _PCIE4, 142, _CLOUD, "L40 datasheet"),
    Gpu("L40S", 44.39, 864, 0, _PCIE4, 142, 6.25, "L40S datasheet; network: AWS g6e.48xlarge"),
    Gpu("A100 40GB", 39.39, 1555, 300, _PCIE4, 108, _DGX_A100, "A100 datasheet, SXM"),
    Gpu("A100 80GB", 79.14, 2039, 300, _PCIE4, 108, _DGX_A100, "A100 datasheet, SXM"),
    Gpu("A100 40GB PCIe", 39.39, 1555, 0, _PCIE4, 108, 2.5, "A100 datasheet; its bridge joins only pairs"),
    Gpu("A100 80GB PCIe", 79.14, 1935, 0, _PCIE4, 108, 2.5, "A100 datasheet; network: Azure NC96ads_A100_v4"),
    Gpu("A800", 79.14, 2039, 200, _PCIE4, 108, _DGX_A100, "A800 datasheet, SXM, 80 GB: an A100 with 400 GB/s NVLink"),
    Gpu("H100", 79.10, 3350, 450, _PCIE5, 132, _DGX_H100, "H100 datasheet, SXM"),
    Gpu("H100 PCIe", 79.10, 2000, 0, _PCIE5, 114, 2.5, "H100 datasheet; its bridge joins only pairs"),
    Gpu("H100 NVL", 93.1, 3938, 0, _PCIE5, 132, 2.5, "H100 datasheet, NVL; its bridge joins only pairs"),
    Gpu("H800", 79.10, 3350, 200, _PCIE5, 132, _DGX_H100, "H800 datasheet, SXM: an H100 with 400 GB/s NVLink"),
    Gpu("H20", 95.0, 4000, 450, _PCIE5, 78, _DGX_H100, "H20 datasheet, 96 GB"),
    Gpu("H200", 139.72, 4800, 450, _PCIE5, 132, _DGX_H100, "H200 datasheet, SXM"),
    Gpu("GH200", 94.50, 4000, 450, 450, 132, _DGX_H100, "GH200 datasheet, 96 GB; the host is reached over NVLink-C2C"),
    Gpu("B200", 178.35, 8000, 900, _PCIE5, 148, _DGX_H100, "DGX B200 datasheet"),
    Gpu("GB200", 184.31, 8000, 900, 225, 148, _DGX_H100, "GB200 NVL72 datasheet; two GPUs share 450 GB/s to the host"),
    Gpu("B300", 267.69, 8000, 900, _PCIE5, 148, 100.0, "HGX B300; 270 GB: MLPerf Inference 6.0; 800 Gb/s per GPU"),
    Gpu("MI300X", 191.69, 5300, 448, _PCIE5, 304, 50.0, "MI300X datasheet; seven Infinity Fabric links"),
    Gpu("MI325X", 255.69, 6000, 448, _PCIE5, 304, 50.0, "MI325X datasheet; seven Infinity Fabric links"),
)
DESKTOP = (*_GEFORCE, *_WORKSTATION)
"""GPUs that are sold for desktop computers and workstations."""
GPUS = (*DESKTOP, *_DATA_CENTRE)
DESKTOP_HOST = 64.0
"""GiB of host memory that a desktop computer is assumed to have."""
DESKTOP_GPUS = 2
"""Number of GPUs that fit into an ordinary desktop computer."""
_OTHER_MODELS = frozenset({"ti", "super", "laptop", "mobile", "d", "max", "ada", "nvl"})
"""Words that distinguish GPUs of the same number."""
_SAME_MEMORY = 0.15
"""Tolerance between the memory in a GPU's name and the memory that a program can allocate, as a share."""
_NEAR = 3
"""Number of GPUs suggested for an unknown name."""


def find(name: str) -> Gpu:
    """Return a GPU by its common name or by that of `nvidia-smi -L` (`4090`, `a100-80gb`, `NVIDIA H100 80GB HBM3`).

    Raises:
        UserError: no GPU matches the name, or several do.
    """
    words = _words(name)
    within = [gpu for gpu in GPUS if _words(gpu.name) <= words and not _is_another(gpu, words - _words(gpu.name))]
    if within:
        return max(within, key=lambda gpu: len(_words(gpu.name)))
    around = [gpu for gpu in GPUS if words and words <= _words(gpu.name)]
    around = [gpu for gpu in around if _words(gpu.name) - words <= {"rtx"}] or around
    if len(around) == 1:
        return around[0]
    if around:
        raise UserError(f"--gpu {name}: which one? {', '.join(gpu.name.replace(' ', '-') for gpu in around)}.")
    raise UserError(f"--gpu {name}: unknown; {_nearest(name)}\nFor any other GPU, give --gpu-memory GIB.")


def _is_another(gpu: Gpu, more: frozenset[str]) -> bool:
    """Return whether the remaining words of a name denote another GPU of the same number, or other memory."""
    memories = [int(word[:-2]) for word in more if re.fullmatch(r"\d+gb", word)]
    named = memories if gpu.pcie_gbs <= _PCIE5 else []  # the name of a superchip states its host's memory
    return bool(more & _OTHER_MODELS) or any(abs(gib / gpu.memory_gib - 1) > _SAME_MEMORY for gib in named)


def _words(name: str) -> frozenset[str]:
    """Return the words of a GPU's name: `RTX4090`, `2080ti` and `a100-80g` as `rtx 4090`, `2080 ti`, `a100 80gb`."""
    text = re.sub(r"\brtx(?=\d)", "rtx ", re.sub(r"[^a-z0-9]+", " ", name.lower()))
    text = re.sub(r"(?<=\d)(?=(ti|super)\b)", " ", text)
    return frozenset(re.sub(r"\b(\d+)g\b", r"\1gb", text).split())


def _nearest(name: str) -> str:
    """Return suggestions for an unknown GPU: similar names, and GPUs with about the memory it is likely to have."""
    known = {known.lower(): known for known in [*(gpu.name for gpu in GPUS), *INSTANCES]}
    bare = re.sub(r"\b(nvidia|geforce|tesla|amd|instinct|gpu)\b", "", name.lower()).strip()
    numbers = {word for word in _words(name) if re.search(r"\d{2}", word) and not re.fullmatch(r"\d+gb", word)}
    same_number = [gpu.name for gpu in GPUS if numbers & _words(gpu.name)]
    similar = [known[match] for match in get_close_matches(bare, known, n=_NEAR, cutoff=0.6)]
    close = list(dict.fromkeys([*same_number, *similar]))[:_NEAR]
    stated = re.search(r"(\d+)\s*gi?b?\b", name.lower())
    if not close and not stated:
        return f"{all_names()}."
    by_name = f"did you mean {', '.join(close)}?" if close else "none has a similar name."
    if stated:
        gib, whose = float(stated[1]), ""
    else:
        first = INSTANCES[close[0]].gpu if close[0] in INSTANCES else close[0]
        gib, whose = next(gpu.memory_gib for gpu in GPUS if gpu.name == first), f" ({first})"
    alike = sorted((gpu for gpu in GPUS if gpu.name not in close), key=lambda gpu: abs(gpu.memory_gib - gib))
    return f"{by_name} GPUs with about {gib:.0f} GiB{whose}: {', '.join(gpu.name for gpu in alike[:_NEAR])}."


def all_names() -> str:
    """Return the names of all GPUs, as the end of a sentence."""
    return f"known GPUs are {', '.join(gpu.name for gpu in GPUS)}"


def host_gbs(gpu: Gpu, gpus: int) -> float:
    """Return the usual memory bandwidth of a host with `gpus` GPUs of this kind, in GB/s.

    Two channels of DDR5-5600 in a desktop; eight channels of DDR4-3200 in a workstation or a server of desktop GPUs;
    two sockets with eight channels of DDR5-4800 each for GPUs with PCIe 5, and otherwise with six channels of
    DDR4-2666. Hosts of A100s have 410 GB/s, but a step on a DGX A100 took even longer than predicted with 256
    (DeepSpeed's blog of 2025-10-06, two ranks).
    """
    name = gpu.like or gpu.name
    if gpus <= DESKTOP_GPUS and name in {one.name for one in _GEFORCE}:
        return 90
    if name in {one.name for one in DESKTOP}:
        return 205
    return 614 if gpu.pcie_gbs >= _PCIE5 else 256


def with_memory(gib: float, name: str | None = None) -> Gpu:
    """Return a GPU of which only the memory is known, with the speed of the slowest GPU with the nearest memory."""
    modern = [gpu for gpu in GPUS if gpu.bf16]
    like = min(modern, key=lambda gpu: (round(abs(gpu.memory_gib - gib) / gib, 1), gpu.bf16_tflops))
    name = name or f"GPU with {gib:g} GiB"
    return replace(
        like, name=name, like=like.name, memory_gib=gib, source=f"{name}, assumed to be as fast as {like.name}"
    )
