"""What hardware and software reach of what they promise: measured, and kept as data in `measurements/`."""

import json
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
    memory: float = 0.8
    """Share of the memory's bandwidth that element-wise work reaches."""
    link: float = 0.75
    """Share of the link inside a node that collectives reach."""
    network: float = 0.75
    """Share of a node's network that collectives reach."""
    overlap: float = 0.8
    """Share of ZeRO's traffic that is hidden behind computation, as far as that lasts."""
    passes: float = 1.0
    """How often element-wise work reads or writes what a layer computes: fewer where kernels are fused."""
    scores: float = 12.0
    """Bytes moved forward per score of attention that is not fused."""
    waves: float = 0.5
    """Of the waves in which a matrix product's tiles are worked off: how many go to waste."""
    unaligned: float = 1.0
    """Share of a matrix product's rate that is left where a dimension is no multiple of 64."""
    latency: float = 5e-6
    """Seconds of a collective per node that takes part, whatever it carries."""
    launch: float = 5e-4
    """Seconds that Python and the driver need to start the kernels of one layer's forward pass."""
    measured: bool = True
    """Whether this GPU's shares were measured; else they are another's."""


@cache
def _data() -> dict[str, Any]:
    return json.loads(FILE.read_text())


def constants(gpu: str, software: str = "deepspeed") -> Constants:
    """Return the constants of a GPU (a name of `hardware.GPUS`) and of the software that trains on it.

    `software` is a key of `constants.json`: what its tables were measured with, or ours.
    """
    data = _data()
    kind = max((kind for kind in data["gpus"] if gpu.startswith(kind)), key=len, default=None)
    shares = data["gpus"][kind or "other"]["values"]
    return Constants(**shares, **data["software"][software]["values"], measured=kind is not None)
