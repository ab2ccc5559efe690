"""The constants of a machine that was measured (`hardware.machine_file`)."""

from dataclasses import replace

from ..hardware.gpus import Gpu
from ..hardware.machine_file import Machine, attention_operations
from .constants import Constants
from .time.attention_time import HALF_SPEED
from .time.host_time import KERNELS
from .time.roofline import TILE

TRAINED = 0.84
"""Share of the rate of a large product by itself that products reach in a run, where the clock falls with the power:
0.63 of an H100's peak fitted to published runs, against 745 of 989 TFLOP/s alone (an H100 of ours, 2026-11-26)."""
LAYER_MODULES = 9
"""Modules with weights in a Llama layer, which ZeRO-3 fetches and releases one by one."""


def constants(machine: Machine, assumed: Constants, gpu: Gpu, precision: str) -> Constants:
    """Return the cost model's constants, with those measured on a machine in place of the assumed ones.

    Args:
        machine: the measurements.
        assumed: the constants of this kind of GPU.
        gpu: the GPU whose peak the shares are of.
        precision: the run's; fp32 has rates of its own.
    """
    dtype = "fp32" if precision == "fp32" else "bf16"
    peak = gpu.bf16_tflops * 1e12
    plain, sharded = (machine.seconds[f"layer {name}"] for name in ("zero1", "zero3"))
    found = {
        "matmul": TRAINED * _product_rate(machine, dtype, assumed.waves * TILE * gpu.units) / peak,
        "memory": 1.0,
        "link": 1.0,
        "peer": 1.0 if assumed.peer else 0.0,
        "launch": plain["forward"] / KERNELS,
        "hook": max(0.0, sharded["forward"] - plain["forward"]) / LAYER_MODULES,
        "step": plain["step"],
        "step_sharded": sharded["step"],
        "kernels": {**assumed.kernels, **_kernels(machine, dtype, peak)},
        "measured": True,
    }
    if "all_gather small" in machine.seconds:
        found["latency"] = machine.seconds["all_gather small"]
        found["waiting"] = 0.0  # the hooks were measured on all ranks of the node
    return replace(assumed, **found)


def _kernels(machine: Machine, dtype: str, peak: float) -> dict[str, tuple[float, float]]:
    """Return the share of the peak that each attention kernel would reach on long sequences, by pass."""
    length, taken = machine.sizes["length"], machine.seconds["attention"]
    operations = attention_operations(machine.sizes) * (1 + HALF_SPEED / length)
    found = {}
    for name in {key.split()[0] for key in taken if f" {dtype} " in key}:
        ahead, both = (taken[f"{name} {dtype} {which}"] for which in ("forward", "both"))
        if both > ahead:
            found[name] = (operations / ahead / peak, 2.5 * operations / (both - ahead) / peak)
    return found


def _product_rate(machine: Machine, dtype: str, lost: float) -> float:
    """Return the operations per second of a product without the `lost` elements, by the largest product measured."""
    seconds = {int(name.split()[0]): taken for name, taken in machine.seconds["products"].items() if dtype in name}
    side = max(seconds)
    return float(2 * side**3 / seconds[side] * (1 + lost / side**2))
