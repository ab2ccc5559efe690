"""The time estimate's constants for a machine that `doctor --measure` has timed, in place of assumed ones."""

from dataclasses import replace

from ..hardware.gpus import Gpu
from ..hardware.machine_file import CPU, HEAD_WIDTH, NARROW_HEAD, Machine, attention_operations
from .constants import COUNTS, Constants, Cpu


def measured_constants(machine: Machine, assumed: Constants, gpu: Gpu, precision: str) -> Constants:
    """Return the constants of this kind of GPU, `assumed`, with those measured on a machine in their place."""
    dtype, peak, seconds = "fp32" if precision == "fp32" else "bf16", gpu.bf16_tflops * 1e12, machine.seconds
    if machine.device == CPU:
        return _on_cpus(machine, assumed, gpu, dtype)
    plain, sharded = seconds["layer zero1"], seconds["layer zero3"]
    side, rate = machine.product_rates(dtype)[-1]
    lost = assumed.waves * COUNTS.product_tile * gpu.units  # elements
    length, attention = machine.sizes["length"], seconds["attention"]
    operations = attention_operations(machine.sizes) * (1 + COUNTS.half_speed / length) / peak
    kernels = dict(assumed.kernels)
    for name in {key.split()[0] for key in attention if f" {dtype} " in key}:
        ahead, both = (attention[f"{name} {dtype} {which}"] for which in ("forward", "both"))
        if both > ahead:
            kernels[name] = (operations / ahead, 2.5 * operations / (both - ahead))
    found = replace(
        assumed,
        matmul=COUNTS.trained_products * rate * (1 + lost / side**2) / peak,
        memory=1.0,
        link=1.0,
        peer=1.0 if assumed.peer else 0.0,
        launch=plain["forward"] / COUNTS.kernels,
        hook=max(0.0, sharded["forward"] - plain["forward"]) / COUNTS.layer_modules,
        step=plain["step"],
        step_sharded=sharded["step"],
        kernels=kernels,
        network=1.0 if machine.network_gbs else assumed.network,
        measured=True,
    )
    if "all_gather small" not in seconds:
        return found
    # The hooks were measured on all ranks of the node.
    return replace(found, latency=seconds["all_gather small"], waiting=0.0)


def _on_cpus(machine: Machine, assumed: Constants, gpu: Gpu, dtype: str) -> Constants:
    """Return the constants of CPU ranks, which are all measured."""
    seconds, peak, suffix = machine.seconds, gpu.bf16_tflops * 1e12, " fp32" if dtype == "fp32" else ""
    plain, zero1, zero3 = (seconds[f"layer {name}"] for name in ("plain", "zero1", "zero3"))
    alone = seconds["layer plain fp32"] if dtype == "fp32" else plain
    ahead, behind = (max(0.0, zero3[name] - zero1[name]) for name in ("forward", "backward"))
    updated, gradients = (
        tuple(machine.alone["parameter"][f"{dtype} {name} {which}"] for name in ("plain", "zero1", "zero3"))
        for which in ("step", "backward")
    )
    cpu = Cpu(
        products=tuple((float(side), rate) for side, rate in machine.product_rates(dtype)),
        score=_per_score(machine, dtype),
        backward_launches=alone["backward"] / alone["forward"],
        backward_hooks=behind / ahead if ahead else 0.0,
        gradient_hook=max(0.0, zero1["backward"] - plain["backward"]) / COUNTS.layer_modules,
        updated=updated,
        gradients=gradients,
        rest=tuple((layer["rest forward"] + layer["rest backward"], layer["rest step"]) for layer in (zero1, zero3)),
    )
    latency, link = 0.0, 1.0
    if machine.ranks > 1:
        gather = seconds[f"all_gather large{suffix}"]
        latency = min(gather, seconds[f"all_gather small{suffix}"])
        ahead = max(0.0, ahead - latency)  # it contains the collective that gathers the layer
        received = (machine.ranks - 1) / machine.ranks * machine.sizes["message"]
        link = received / max(1e-9, gather - latency) / (gpu.pcie_gbs * 1e9)
        reduced, scattered = (seconds[f"{name} large{suffix}"] for name in ("all_reduce", "reduce_scatter"))
        cpu = replace(cpu, all_reduce=reduced / (2 * gather), reduce_scatter=scattered / gather)
    return replace(
        assumed,
        matmul=cpu.products[-1][1] / peak,
        waves=0.0,
        memory=_elementwise(machine, dtype, alone["forward"], assumed.passes, cpu) / (gpu.memory_gbs * 1e9),
        link=link,
        peer=0.0,
        latency=latency,
        gap=0.0,
        overlap=0.0,
        unaligned=1.0,
        launch=alone["forward"] / COUNTS.kernels,
        hook=ahead / COUNTS.layer_modules,
        waiting=0.0,
        step=zero1["step"],
        step_sharded=zero3["step"],
        kernels={},
        cpu=cpu,
        measured=True,
    )


def _per_score(machine: Machine, dtype: str) -> tuple[tuple[float, float], ...]:
    """Return the seconds of attention per score, and per score and unit of the heads' width, by pass."""
    scores, taken = machine.sizes["heads"] * machine.sizes["length"] ** 2, machine.seconds["attention"]
    found = []
    for which, less in (("forward", 0.0), ("both", 1.0)):
        narrow, wide = (
            (taken[f"{name} {dtype} {which}"] - less * taken[f"{name} {dtype} forward"]) / scores
            for name in ("narrow", "flash_2")
        )
        per_width = max(0.0, wide - narrow) / (HEAD_WIDTH - NARROW_HEAD)
        found.append((max(0.0, narrow - NARROW_HEAD * per_width), per_width))
    return tuple(found)


def _elementwise(machine: Machine, dtype: str, launches: float, passes: float, cpu: Cpu) -> float:
    """Return the bytes per second of a layer's element-wise operations, by the engine's count of bytes in bf16.

    They are what the passes of a layer take beyond its products, its attention and Python.
    """
    hidden, inner, heads, kept, sequences, length = machine.sizes["wide"].values()
    tokens, weights = sequences * length, hidden * (hidden * (2 + 2 * kept / heads) + 3 * inner)
    rest = sum(machine.seconds["wide"][f"{dtype} {name}"] for name in ("forward", "backward"))
    rest -= 6 * tokens * weights / cpu.products[-1][1] + (1 + cpu.backward_launches) * launches
    rest -= tokens * length * heads * sum(each + wide * hidden / heads for each, wide in cpu.score)
    moved = 3 * 2 * tokens * (passes * weights / hidden + COUNTS.residual * hidden)
    return float(moved / max(rest, moved * machine.seconds["copy"] / (2 * machine.sizes["copy"])))
