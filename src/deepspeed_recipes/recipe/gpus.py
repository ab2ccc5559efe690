"""Peak throughput of GPUs, and the unit of their memory. Standard library only."""

import re
import tomllib
from functools import cache
from pathlib import Path

GIB = 2**30
"""Bytes of a GiB."""

BF16_TFLOPS: dict[str, float] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""Dense matrix products in bf16, without sparsity, in 10^12 operations per second, by the GPU's name."""


@cache  # a search calls this for each matrix product of each plan
def peak_flops(device: str) -> float | None:
    """Return the peak operations per second of a GPU by its device name (`NVIDIA H100 80GB HBM3`), or None."""
    words = device.replace("-", " ")
    for name in sorted(BF16_TFLOPS, key=len, reverse=True):
        if re.search(rf"\b{name}\b", words):
            return BF16_TFLOPS[name] * 1e12
    return None
