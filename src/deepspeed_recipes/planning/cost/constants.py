"""Constants of the time estimate: what share of their datasheets hardware and software reach, as measured."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "constants.json"
"""Written by `scripts/maintain/calibration/calibrate.py`."""


@dataclass(frozen=True)
class Constants:
    """Shares of a datasheet's figures, and what no datasheet states."""

    matmul: float
    """Share of the peak that large matrix products reach."""
    attention: float
    """Share of the peak that fused attention reaches, where `kernels` are not told apart."""
    waves: float
    """Waves of a matrix product's tiles that are lost to quantisation, per product."""
    memory: float
    """Share of the memory bandwidth that element-wise operations reach."""
    link: float
    """Share of the link inside a node, or to the host, that is reached."""
    network: float
    """Share of a node's network that collectives reach."""
    latency: float
    """Seconds of a collective per participating node, whatever its size; ZeRO runs one per layer."""
    passes: float
    """How often element-wise operations read or write what a layer computes: less often where kernels are fused."""
    gap: float
    """Seconds that the GPU idles between the kernels of one layer's forward pass, however long they run."""
    overlap: float = 0.0
    """Share of ZeRO's communication that overlaps with computation, as long as there is any."""
    scores: float = 0.0
    """Bytes moved per score in the forward pass of attention that is not fused."""
    unaligned: float = 1.0
    """Share of a matrix product's rate that remains where a dimension is not a multiple of 64."""
    launch: float = 5e-6
    """Seconds in which Python launches a kernel, while the GPU runs earlier ones."""
    dequantize: float = 0.85
    """Share of the memory bandwidth that unpacking 4-bit weights reaches."""
    peer: float = 0.0
    """Share of PCIe that collectives reach inside a node without NVLink: GeForce GPUs cannot read each other's memory,
    so that everything passes through the host's. 0: the same as `link`."""
    hook: float = 0.0
    """Seconds in which ZeRO-3 fetches or releases a module, on the host of one rank, at each pass."""
    waiting: float = 0.0
    """Share by which that takes longer for each further rank, with which it exchanges weights."""
    step: float = 0.8e-4
    """Seconds per trained weight in which the host launches an optimizer step: norms, scales, copies (deepspeed 0.19.8,
    Llamas of 8 and 16 layers with nine weights each, 64 wide, two CPU ranks, process time: 0.7 ms per layer)."""
    step_sharded: float = 1.3e-4
    """The same under ZeRO-3 (likewise: 1.1 and 1.2 ms per layer)."""
    kernels: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Shares of the peak that each attention kernel reaches on long sequences, forward and backward; empty: software of
    a table whose kernel was another."""
    measured: bool = True
    """Whether this kind of GPU was measured; otherwise its shares are those of another."""


def resolve(data: Mapping[str, Any], gpu: str, software: str) -> Constants:
    """Return the constants of a GPU and of the software that trains on it, out of all in `data`."""
    gpus = data["gpus"]
    kind = max((kind for kind in gpus if gpu.startswith(kind)), key=len, default="other")
    measured = not {"like", "assumed"} & set(gpus[kind])
    own, kind = gpus[kind], gpus[kind].get("like", kind)
    entry = data["software"][software]
    taken = {name: data["software"][other]["values"][name] for name, other in entry.get("takes", {}).items()}
    hardware = gpus[kind]["values"]
    hardware = {**hardware, **{name: hardware[name] * times for name, times in own.get("times", {}).items()}}
    values = {**data["common"]["values"], **hardware, **taken, **entry["values"], "measured": measured}
    kernels = own.get("kernels", gpus[kind]["kernels"]) if entry.get("by_kernel") else {}
    return Constants(**values, kernels={name: (forward, backward) for name, (forward, backward) in kernels.items()})


@cache
def constants(gpu: str, software: str = "deepspeed") -> Constants:
    """Return the constants of a GPU (a name in `gpus.GPUS`) and of the software that trains on it.

    Args:
        gpu: one that was not measured has the shares of the nearest one that was.
        software: a key in `constants.json`: `deepspeed` is this project's, the others are those of published tables.
    """
    return resolve(json.loads(FILE.read_text()), gpu, software)
