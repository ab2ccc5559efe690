"""Peak throughput of GPUs, and the unit of their memory. Standard library only."""

import re
from functools import cache

GIB = 2**30
"""Bytes of a GiB."""

BF16_TFLOPS = {
    "RTX 2080 Ti": 53.8,  # Turing whitepaper: fp16 with fp32 accumulation; it has no bf16
    "RTX 3060": 25.5,  # GA102 whitepaper's rate per SM and clock, at 28 SMs and 1,777 MHz
    "RTX 3080": 59.5,  # GA102 whitepaper: bf16 with fp32 accumulation
    "RTX 3090": 71,
    "RTX 3090 Ti": 80,  # GA102 whitepaper's rate per SM and clock, at 84 SMs and 1,860 MHz
    "RTX 4060": 30.2,  # Ada whitepaper's rate per SM and clock, at 24 SMs and 2,460 MHz
    "RTX 4060 Ti": 44.1,  # likewise, at 34 SMs and 2,535 MHz
    "RTX 4070": 58.3,  # likewise, at 46 SMs and 2,475 MHz
    "RTX 4080": 97.5,  # Ada whitepaper
    "RTX 4090": 165.2,
    "RTX 5090": 209.5,  # RTX Blackwell whitepaper
    "A5000": 111.1,  # RTX A5000 datasheet
    "A6000": 154.8,  # RTX A6000: GA102 whitepaper
    "RTX 6000 Ada": 364.2,  # datasheet
    "RTX PRO 6000": 503.8,  # RTX Blackwell PRO whitepaper
    "T4": 65,  # datasheet; fp16: it has no bf16
    "V100": 125,  # datasheet, SXM2; fp16: it has no bf16
    "L4": 121,
    "A10": 125,
    "A10G": 70,  # AWS g5
    "A30": 165,
    "L40": 181,
    "L40S": 362,
    "A100": 312,
    "A800": 312,
    "H100 PCIe": 756,
    "H100 NVL": 835.5,
    "H100": 989.4,  # SXM
    "H800": 989.4,
    "H20": 148,
    "H200": 989.4,
    "GH200": 989.4,
    "B200": 2250,
    "GB200": 2500,
    "B300": 2250,
    "MI300X": 1307.4,
    "MI325X": 1307.4,
}
"""Dense matrix products in bf16, without sparsity, in 10^12 operations per second: the makers' datasheets."""


@cache  # a search calls this for each matrix product of each plan
def peak_flops(device: str) -> float | None:
    """Return the peak operations per second of a GPU by its device name (`NVIDIA H100 80GB HBM3`), or None."""
    words = device.replace("-", " ")
    for name in sorted(BF16_TFLOPS, key=len, reverse=True):
        if re.search(rf"\b{name}\b", words):
            return BF16_TFLOPS[name] * 1e12
    return None
