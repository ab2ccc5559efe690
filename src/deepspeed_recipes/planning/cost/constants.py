"""Constants of the estimates: counted, fitted on measured runs, or measured by `doctor --measure` on this machine."""

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

from ...recipe.files import JsonView
from ...recipe.recipe import Precision
from ..hardware.gpus import Gpu
from ..hardware.machine_file import CPU, HEAD_WIDTH, NARROW_HEAD, Machine, attention_operations
from .training_setup import TrainingSetup

FILE = Path(__file__).parents[1] / "constants.json"
"""Written by `scripts/maintain/calibration/calibrate.py`."""


class Counts(dict[str, float]):
    """The numbers of `counts.toml`, which are counted or assumed, as attributes."""

    def __getattr__(self, name: str) -> float:
        """Return a number by its name."""
        return self[name]


COUNTS = Counts(tomllib.loads(FILE.with_name("counts.toml").read_text(encoding="utf-8")))
vars(COUNTS).update(COUNTS)  # found without `__getattr__`, which a search would call fifty thousand times


@dataclass(frozen=True)
class Constants:
    """Shares of datasheet values, and values that no datasheet states."""

    matmul: float
    """Share of the peak that large matrix products reach."""
    waves: float
    """Waves of tiles per matrix product that are lost to wave quantisation."""
    memory: float
    """Share of the memory bandwidth that element-wise operations reach."""
    link: float
    """Share of the bandwidth that links inside a node and to the host reach."""
    network: float
    """Share of a node's network that collectives reach."""
    latency: float
    """Seconds of a collective per participating node, for any size; ZeRO runs one per layer."""
    passes: float
    """Number of times that element-wise operations read or write a layer's results; fused kernels need fewer."""
    gap: float
    """Seconds that the GPU idles between the kernels of one layer's forward pass, however long they run."""
    overlap: float
    """Share of ZeRO's communication that overlaps with computation, as long as there is computation."""
    scores: float
    """Bytes moved per score in the forward pass of unfused attention."""
    unaligned: float
    """Share of a matrix product's rate that remains if a dimension is not a multiple of 64."""
    launch: float
    """Seconds in which Python launches a kernel, while the GPU runs earlier ones."""
    hook: float
    """Seconds in which the host of one rank fetches or releases a module under ZeRO-3, per pass."""
    waiting: float
    """Relative increase of `hook` for each further rank that exchanges weights."""
    step: float
    """Seconds per trained weight in which the host launches an optimizer step: norms, scales, copies."""
    step_sharded: float
    """The same under ZeRO-3."""
    kernels: Mapping[str, tuple[float, float]]
    """Shares of the peak that each attention kernel reaches on long sequences, forward and backward."""
    measured: bool
    """False if this kind of GPU was not measured and has the shares of another."""
    peer: float = 0.0
    """Share of PCIe bandwidth that collectives reach inside a node without NVLink. GeForce GPUs cannot read each
    other's memory, so all data pass through the host's. 0 stands for the same share as `link`."""
    cpu: "Cpu | None" = None
    """Rates of a rank that is a process on a CPU; None for GPUs."""


@dataclass(frozen=True)
class Cpu:
    """Rates of a CPU rank, on whose cores Python, computation and collectives take turns instead of overlapping.

    They are for one precision, and all measured. Times are in seconds.
    """

    score: tuple[tuple[float, float], ...]
    """Attention per score, and per score and unit of the heads' width; for the forward and the backward pass."""
    updated: float
    """Optimizer step per updated parameter."""
    gradients: tuple[float, ...]
    """Backward pass per trained parameter, independent of the tokens: writing the gradient, and ZeRO's copies."""
    rest: tuple[tuple[float, float], ...]
    """Python outside the layers, per micro-batch and per step: without ZeRO-3, and with it."""


def resolve(data: JsonView, gpu: str) -> Constants:
    """Return the constants of a GPU from `data`, the content of `constants.json`."""
    gpus = data["gpus"]
    kind = max((kind for kind in gpus if gpu.startswith(kind)), key=len, default="other")
    own, like = gpus[kind], gpus[gpus[kind].get("like", kind)]
    scaled = {name: like["values"][name] * times for name, times in own.get("times", {}).items()}
    kernels = {name: tuple(shares) for name, shares in own.get("kernels", like["kernels"]).items()}
    measured = not {"like", "assumed"} & set(own)
    return Constants(**data["common"]["values"], **like["values"] | scaled, kernels=kernels, measured=measured)


@cache
def constants(gpu: str) -> Constants:
    """Return the constants of a GPU by its name in `gpus.GPUS`.

    A GPU that was not measured has the shares of the most similar measured GPU.
    """
    return resolve(json.loads(FILE.read_text(encoding="utf-8")), gpu)


ALL = "all"
DATASHEET = "datasheet"
"""The kind of speeds on machines that were not measured: all published runs that can be planned."""
CPU_SPEEDS = (0.762, 1.182)
"""The 95 % prediction interval of measured / predicted speed of CPU ranks, by the cases with which terms were found
(scripts/maintain/calibration/cpu_speed.py); the cases that judge do not count."""


def kinds_of(setup: TrainingSetup) -> tuple[str, ...]:
    """Return the kinds that a run belongs to, the narrowest first.

    Measurements differ most by whether ZeRO-3 shards the weights: gathered weights come and go, and wait for the host
    and the links. If kinds were also divided by method and layout, each would have fewer publishers, and its range
    would cover fewer measurements of other publishers.
    """
    return "sharded" if setup.zero_stage == 3 and setup.zero_ranks > 1 else "whole", ALL


def memory_range(setup: TrainingSetup) -> tuple[float, float]:
    """Return low and high factors of a GPU's peak: the 5 % and 95 % quantiles of measured / predicted by kind."""
    return _range("memory", kinds_of(setup))


def speed_range(setup: TrainingSetup, measured: bool, on_cpu: bool = False, spread: float = 0.0) -> tuple[float, float]:
    """Return the same of tokens per second, wider if the machine was not `measured`: hosts and links differ most.

    On CPUs it is also wider by the `spread` of the machine's own speed, which both the measurement and the run have;
    1.96 standard deviations are the 95 % of `CPU_SPEEDS`.
    """
    if on_cpu:
        below, above = (math.hypot(math.log(factor), 1.96 * math.sqrt(2) * spread) for factor in CPU_SPEEDS)
        return math.exp(-below), math.exp(above)
    return _range("time", kinds_of(setup) if measured else (DATASHEET,))


@cache
def _range(measure: str, kinds: tuple[str, ...]) -> tuple[float, float]:
    known = json.loads(FILE.read_text(encoding="utf-8"))["ranges"][measure]
    low, high = next(known[kind][:2] for kind in kinds if kind in known)
    return min(low, 1.0), max(high, 1.0)


@lru_cache
def constants_of(gpu: Gpu, machine: Machine | None, precision: Precision) -> Constants:
    """Return the constants of a GPU in a precision, with those measured on a machine in their place."""
    assumed, dtype = constants(gpu.name), "fp32" if precision == "fp32" else "bf16"
    if not machine:
        if dtype == "bf16":
            return assumed
        # As TF32, at half the rate of bf16; without TF32 (torch's default) it is slower still.
        kernels = {name: (forward / 2, backward / 2) for name, (forward, backward) in assumed.kernels.items()}
        return replace(assumed, matmul=assumed.matmul / 2, kernels=kernels)
    peak, seconds = gpu.bf16_tflops * 1e12, machine.seconds
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
    ranks = "all_gather small" in seconds  # those of a node, on which the hooks were measured together
    return replace(
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
        latency=seconds["all_gather small"] if ranks else assumed.latency,
        waiting=0.0 if ranks else assumed.waiting,
        measured=True,
    )


def _on_cpus(machine: Machine, assumed: Constants, gpu: Gpu, dtype: str) -> Constants:
    """Return the constants of CPU ranks, which are all measured."""
    seconds, suffix, rate = machine.seconds, " fp32" if dtype == "fp32" else "", machine.product_rates(dtype)[-1][1]
    plain, zero1, zero3 = (seconds[f"layer {name}"] for name in ("plain", "zero1", "zero3"))
    launches = (seconds["layer plain fp32"] if dtype == "fp32" else plain)["forward"]
    parameter = seconds.get("parameter") or machine.alone["parameter"]  # files before 2026-11-28 have the second only
    # Attention takes a time per score, and one per score and unit of the heads' width: heads of two widths tell which.
    scores, taken = machine.sizes["heads"] * machine.sizes["length"] ** 2, seconds["attention"]
    per_score, before = [], (0.0, 0.0)
    for which in ("forward", "both"):
        narrow, wide = (taken[f"{name} {dtype} {which}"] / scores for name in ("narrow", "flash_2"))
        own, more = narrow - before[0], wide - before[1]
        per_width = max(0.0, more - own) / (HEAD_WIDTH - NARROW_HEAD)
        per_score.append((max(0.0, own - NARROW_HEAD * per_width), per_width))
        before = narrow, wide
    cpu = Cpu(
        score=tuple(per_score),
        updated=parameter[f"{dtype} zero1 step"],
        gradients=tuple(parameter[f"{dtype} {name} backward"] for name in ("plain", "zero1", "zero3")),
        rest=tuple((layer["rest forward"] + layer["rest backward"], layer["rest step"]) for layer in (zero1, zero3)),
    )
    latency, link, hooks = 0.0, 1.0, max(0.0, zero3["forward"] - zero1["forward"])
    if machine.ranks > 1:
        gather = seconds[f"all_gather large{suffix}"]
        latency = min(gather, seconds[f"all_gather small{suffix}"])
        hooks = max(0.0, hooks - latency)  # it contains the collective that gathers the layer
        received = (machine.ranks - 1) / machine.ranks * machine.sizes["message"]
        link = received / max(1e-9, gather - latency) / (gpu.pcie_gbs * 1e9)
    # A layer's element-wise operations take what its passes take beyond its products, its attention and Python; their
    # bytes are the engine's count, in bf16.
    hidden, inner, heads, kept, sequences, length = machine.sizes["wide"].values()
    tokens, weights = sequences * length, hidden * (hidden * (2 + 2 * kept / heads) + 3 * inner)
    rest = sum(seconds["wide"][f"{dtype} {name}"] for name in ("forward", "backward"))
    rest -= 6 * tokens * weights / rate + (1 + COUNTS.backward_launches) * launches
    rest -= tokens * length * heads * sum(each + wide * hidden / heads for each, wide in cpu.score)
    moved = 3 * 2 * tokens * (assumed.passes * weights / hidden + COUNTS.residual * hidden)
    moved_per_second = moved / max(rest, moved * seconds["copy"] / (2 * machine.sizes["copy"]))
    return replace(
        assumed,
        matmul=rate / (gpu.bf16_tflops * 1e12),
        waves=0.0,
        memory=moved_per_second / (gpu.memory_gbs * 1e9),
        link=link,
        peer=0.0,
        latency=latency,
        gap=0.0,
        overlap=0.0,
        unaligned=1.0,
        launch=launches / COUNTS.kernels,
        hook=hooks / COUNTS.layer_modules,
        waiting=0.0,
        step=zero1["step"],
        step_sharded=zero3["step"],
        kernels={},
        cpu=cpu,
        measured=True,
    )
