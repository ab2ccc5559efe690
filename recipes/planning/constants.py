"""What hardware and software reach of what they promise: measured, and kept as data in `measurements/`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

MEASUREMENTS = Path(__file__).parent / "measurements"
FILE = MEASUREMENTS / "constants.json"


@dataclass(frozen=True)
class Constants:
    """Shares of a datasheet's figures, and what no datasheet says."""

    matmul: float
    """Share of the peak that large matrix products reach."""
    attention: float
    """Share of the peak that fused attention reaches."""
    waves: float
    """Of the waves in which a matrix product's tiles are worked off: how many go to waste."""
    memory: float
    """Share of the memory's bandwidth that element-wise work reaches."""
    link: float
    """Share of the link inside a node, or to the host, that is reached."""
    network: float
    """Share of a node's network that collectives reach."""
    latency: float
    """Seconds of a collective per node that takes part, whatever it carries; ZeRO's are one per layer."""
    passes: float
    """How often element-wise work reads or writes what a layer computes: less often where kernels are fused."""
    gap: float
    """Seconds that the GPU waits between the kernels of one layer's forward pass, however much work they have."""
    overlap: float = 0.0
    """Share of ZeRO's traffic that is hidden behind computation, as far as that lasts."""
    scores: float = 0.0
    """Bytes moved forward per score of attention that is not fused."""
    unaligned: float = 1.0
    """Share of a matrix product's rate that is left where a dimension is no multiple of 64."""
    launch: float = 5e-4
    """Seconds that Python takes to start the kernels of one layer's forward pass, while the GPU is at earlier ones."""
    measured: bool = True
    """Whether this kind of GPU was measured; else its shares are another's."""


def resolve(data: Mapping[str, Any], gpu: str, software: str) -> Constants:
    """Return the constants of a GPU and of what trains on it, of all that are in `data`."""
    gpus = data["gpus"]
    kind = max((kind for kind in gpus if gpu.startswith(kind)), key=len, default="other")
    measured = "like" not in gpus[kind]
    kind = gpus[kind].get("like", kind)
    entry = data["software"][software]
    taken = {name: data["software"][other]["values"][name] for name, other in entry.get("takes", {}).items()}
    values = {**data["common"]["values"], **gpus[kind]["values"], **taken, **entry["values"], "measured": measured}
    return Constants(**values | {"attention": entry.get("attention", {}).get(kind, values["attention"])})


@cache
def constants(gpu: str, software: str = "deepspeed") -> Constants:
    """Return the constants of a GPU (a name of `hardware.GPUS`) and of what trains on it.

    Args:
        gpu: one that nobody measured has the shares of the nearest that somebody did.
        software: a key of `constants.json`: ours, or what a published table was measured with.
    """
    return resolve(json.loads(FILE.read_text()), gpu, software)
