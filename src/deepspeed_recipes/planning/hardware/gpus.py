"""The planner's catalogue of GPUs, from their makers' datasheets, with look-up by name or by memory."""

import csv
import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from ...recipe.errors import UserError
from ...recipe.gpus import peak_flops
from .instances import INSTANCES

FILE = Path(__file__).with_name("gpus.csv")


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
    host_gbs: float = 256.0
    """Memory bandwidth of a usual host in GB/s; a desktop computer's is `DESKTOP_GBS`."""
    kind: str = "server"
    """`geforce`, `workstation` or `server`."""
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


_, *_ROWS = csv.reader(line for line in FILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
GPUS = tuple(
    Gpu(name, float(gib), float(gbs), float(link), float(pci), int(units), float(net), float(host), kind, bf16 == "yes")
    for name, kind, gib, gbs, link, pci, units, net, host, bf16, _ in _ROWS
)
"""The catalogue."""
DESKTOP = tuple(gpu for gpu in GPUS if gpu.kind != "server")
"""GPUs that are sold for desktop computers and workstations."""
DESKTOP_HOST = 64.0
"""GiB of host memory that a desktop computer is assumed to have."""
DESKTOP_GPUS, DESKTOP_GBS = 2, 90.0
"""Number of GPUs that fit into an ordinary desktop computer, and its memory bandwidth: two channels of DDR5-5600."""
_OTHER_MODELS = frozenset({"ti", "super", "laptop", "mobile", "d", "max", "ada", "nvl"})
"""Words that distinguish GPUs of the same number."""
_SAME_MEMORY = 0.15
"""Tolerance between the memory in a GPU's name and the memory that a program can allocate, as a share."""


def find(name: str) -> Gpu:
    """Return a GPU by its common name or by that of `nvidia-smi -L` (`4090`, `a100-80gb`, `NVIDIA H100 80GB HBM3`).

    Raises:
        UserError: no GPU matches the name, or several do.
    """
    words = _words(name)
    if len(kinds := [kind for kind in re.split(r"\s*[,+&]\s*", name) if kind]) > 1:
        smallest = min(map(find, kinds), key=lambda gpu: gpu.memory_gib).name.replace(" ", "-")
        raise UserError(
            f"--gpu {name}: plan for one kind; in a mixed machine all wait for the slowest and hold as much as the "
            f"smallest: --gpu {smallest} --gpus {len(kinds)}."
        )
    within = []
    for gpu in GPUS:
        more = words - _words(gpu.name)
        if not _words(gpu.name) <= words or more & _OTHER_MODELS:
            continue
        memories = [int(word[:-2]) for word in more if re.fullmatch(r"\d+gb", word)]
        named = memories if gpu.pcie_gbs <= 63 else []  # beyond PCIe 5: a superchip's name states its host's memory
        if all(abs(gib / gpu.memory_gib - 1) <= _SAME_MEMORY for gib in named):
            within.append(gpu)
    if within:
        return max(within, key=lambda gpu: len(_words(gpu.name)))
    around = [gpu for gpu in GPUS if words and words <= _words(gpu.name)]
    around = [gpu for gpu in around if _words(gpu.name) - words <= {"rtx"}] or around
    if len(around) == 1:
        return around[0]
    if around:
        raise UserError(f"--gpu {name}: which one? {', '.join(gpu.name.replace(' ', '-') for gpu in around)}.")
    # GPUs with the number in the name, or names that are similar.
    known = {known.lower(): known for known in [*(gpu.name for gpu in GPUS), *INSTANCES]}
    bare = re.sub(r"\b(nvidia|geforce|tesla|amd|instinct|gpu)\b", "", name.lower()).strip()
    numbers = {word for word in words if re.search(r"\d{2}", word) and not re.fullmatch(r"\d+gb", word)}
    same_number = [gpu.name for gpu in GPUS if numbers & _words(gpu.name)]
    close = (same_number or [known[match] for match in get_close_matches(bare, known, n=3, cutoff=0.6)])[:3]
    hint = f"did you mean {', '.join(close)}?" if close else f"{all_names()}."
    if close and words & {"laptop", "mobile"}:
        hint = f"a laptop's GPU is slower than the desktop's, here {', '.join(close)}, and may have less memory."
    raise UserError(f"--gpu {name}: unknown; {hint}\nFor any other GPU, give --gpu-memory GIB.")


def _words(name: str) -> frozenset[str]:
    """Return the words of a GPU's name: `RTX4090`, `2080ti` and `a100-80g` as `rtx 4090`, `2080 ti`, `a100 80gb`."""
    text = re.sub(r"\brtx(?=\d)", "rtx ", re.sub(r"[^a-z0-9]+", " ", name.lower()))
    text = re.sub(r"(?<=\d)(?=(ti|super)\b)", " ", text)
    return frozenset(re.sub(r"\b(\d+)g\b", r"\1gb", text).split())


def all_names() -> str:
    """Return the names of all GPUs, as the end of a sentence."""
    return f"known GPUs are {', '.join(gpu.name for gpu in GPUS)}"


def with_memory(gib: float, name: str | None = None) -> Gpu:
    """Return a GPU of which only the memory is known, with the speed of the slowest GPU with the nearest memory."""
    modern = [gpu for gpu in GPUS if gpu.bf16]
    like = min(modern, key=lambda gpu: (round(abs(gpu.memory_gib - gib) / gib, 1), gpu.bf16_tflops))
    return replace(like, name=name or f"GPU with {gib:g} GiB", like=like.name, memory_gib=gib)
