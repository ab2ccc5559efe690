"""Plans: one way to train with its cost, duration and price, whether it fits, and how plans are ranked."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from ...recipe.errors import UserError
from ...recipe.gpus import GIB
from ...recipe.layout import batch_unit
from ...recipe.recipe import Recipe
from ...recipe.run_folder import read_json
from .. import TABLES
from ..cost.constants import COUNTS, memory_range, speed_range
from ..cost.memory import Memory
from ..cost.step_time import StepTime, step_time
from ..cost.training_setup import OWN, Software, TrainingSetup
from ..hardware.cluster import Cluster, Correction
from ..hardware.instances import Prices
from ..hardware.machine_file import median_of
from ..model_profile.profile import ModelProfile

RUNS = Path("runs")
"""The folder in which the launcher keeps runs by default."""
NEWEST = 50
"""Number of runs that are read, the newest ones."""


def kind_of(setup: TrainingSetup) -> str:
    """Return the kind of a run: runs of one kind are predicted too fast or too slow by similar factors."""
    method = "full" if setup.lora is None else "qlora" if setup.quantized else "lora"
    sharded = f"ZeRO-{setup.zero_stage}" if setup.zero_stage == 3 else "ZeRO-0 to 2"
    layout = [f"{name} {size}" for name, size in vars(setup.layout).items() if size > 1]
    offload = [] if setup.offload_optimizer == "none" else [f"optimizer on {setup.offload_optimizer}"]
    return ", ".join([method, sharded, *layout, *offload])


def corrected(cluster: Cluster, runs: Path = RUNS) -> Cluster:
    """Return the cluster with the median of measured / predicted by kind, over finished runs with its GPUs and rates.

    `runs` holds the run folders, `RECIPE/TIME`; a run that cannot be read does not count.
    """
    found: dict[str, list[float]] = {}
    rates = rates_of(cluster)
    for file in sorted(runs.glob("*/*/summary.json"), key=lambda file: file.parent.name)[-NEWEST:]:
        try:
            summary = read_json(file)
            predicted, measured = summary.get("predicted") or {}, summary.get("measured") or {}
            if predicted.get("rates") == rates and measured.get("steady_tokens_per_second"):
                ratio = measured["steady_tokens_per_second"] / predicted["uncorrected_tokens_per_second"]
                found.setdefault(predicted["kind"], []).append(ratio)
        except (UserError, OSError, AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError):
            continue  # cut off, or by hand
    factors = {kind: Correction(median_of(ratios), len(ratios)) for kind, ratios in found.items()}
    return replace(cluster, corrections=factors)


def rates_of(cluster: Cluster) -> str:
    """Return the GPU and where its rates are from; predictions by other rates are corrected by other factors."""
    source = f"measured on {cluster.machine.date}" if cluster.machine else "datasheet"
    return f"{cluster.gpu.name}, {source}"


TIERS: tuple[tuple[str, ...], ...] = tuple(map(tuple, TABLES["tiers"]))
LAST_RESORT = TIERS[-1]
SIMPLICITY = tuple(name for tier in TIERS for name in tier)


@dataclass(frozen=True)
class PlanRequest:
    """A recipe and its model, to be planned on a cluster."""

    recipe: Recipe
    """`model.config` holds the dimensions. The search keeps the method, the global batch and the sequence length."""
    profile: ModelProfile
    cluster: Cluster
    fixed: frozenset[str] = frozenset()
    """Override keys whose value in the recipe must not change."""
    document_length: float | None = None
    """As in `TrainingSetup`; None if the data was not read."""
    software: Software = OWN
    """The stack that trains: this project's, unless the user names another."""

    @property
    def least_micro_batch(self) -> int:
        """The smallest micro-batch that the search may choose."""
        recipe = self.recipe
        return recipe.micro_batch_size if "micro_batch_size" in self.fixed else recipe.method.least_micro_batch

    @property
    def shared_batch(self) -> int:
        """The recipe's global batch, raised until every GPU gets equally many micro-batches."""
        unit = batch_unit(self.recipe, self.cluster.gpus * self.least_micro_batch)
        return math.ceil(self.recipe.global_batch_size / unit) * unit


@dataclass(frozen=True)
class Plan:
    """One way to train, with its cost. Memory is of the fullest GPU at its fullest moment, or of one node."""

    base: Recipe
    """The recipe to launch, apart from the setup's micro-batch and checkpointing."""
    setup: TrainingSetup
    cluster: Cluster
    profile: ModelProfile
    memory: Memory
    shortfalls: tuple[str, ...]
    """Resources that are likely to be exceeded, as parts of a sentence; empty if the plan fits or is tight."""

    @cached_property
    def time(self) -> StepTime:
        """The duration of a step; a plan that does not fit needs none."""
        return step_time(self.profile, self.setup, self.cluster)

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe to launch. Validating one takes as long as planning it, so a search makes it for the best only."""
        size, checkpointing = self.setup.micro_batch_size, self.setup.gradient_checkpointing
        if (self.base.micro_batch_size, self.base.gradient_checkpointing) == (size, checkpointing):
            return self.base
        return replace(self.base, micro_batch_size=size, gradient_checkpointing=checkpointing)

    @property
    def fits(self) -> bool:
        """True if all resources suffice, with the GPU's memory also covering the high end of the predicted range."""
        return not self.shortfalls and not self.tight

    @property
    def tight(self) -> bool:
        """True if the resources are likely to suffice, but the high end of the range exceeds the GPU's memory."""
        return not self.shortfalls and self.gpu_gib_range[1] > self.cluster.gpu.memory_gib

    @cached_property
    def speed(self) -> float:
        """Tokens per second and GPU, corrected by past runs if there are any."""
        return self.time.tokens_per_second_per_gpu * self.correction.factor

    @property
    def seconds(self) -> float:
        """Seconds of a step, corrected likewise."""
        return self.time.seconds / self.correction.factor

    @cached_property
    def correction(self) -> Correction:
        """The correction of the speed by past runs of this kind on this machine."""
        return self.cluster.corrections.get(kind_of(self.setup), Correction(1.0, 0))

    @property
    def components(self) -> Mapping[str, float]:
        """GPU memory in GiB, by purpose."""
        return {name: size / GIB for name, size in self.memory.components.items() if size}

    @cached_property
    def gpu_gib(self) -> float:
        """GPU memory: the sum of the components."""
        return self.memory.gpu / GIB

    @property
    def gpu_gib_range(self) -> tuple[float, float]:
        """The low and high values of `gpu_gib`, from published runs of the same kind (`cost.constants`)."""
        low, high = memory_range(self.setup)
        return low * self.gpu_gib, high * self.gpu_gib

    @property
    def speed_range(self) -> tuple[float, float]:
        """The low and high values of `speed`."""
        machine = self.cluster.machine
        known, spread = machine is not None or self.correction.runs > 0, machine.spread if machine else 0.0
        low, high = speed_range(self.setup, known, self.cluster.on_cpus, spread)
        return low * self.speed, high * self.speed

    @property
    def share(self) -> float:
        """Share of the GPU's memory that is used."""
        return self.gpu_gib / self.cluster.gpu.memory_gib

    @property
    def excess(self) -> float:
        """The largest need as a multiple of what is available."""
        nvme, host = self.memory.nvme_gib, COUNTS.usable * (self.cluster.host_memory_gib or math.inf)
        drives = nvme and (nvme / (COUNTS.usable * self.cluster.nvme_gib) if self.cluster.nvme_gib else math.inf)
        return max(self.share, self.memory.host_gib / host, drives)

    @property
    def tier(self) -> int:
        """Index in `TIERS` of the tier with the plan's file; users' own files count as the first tier."""
        return next((number for number, names in enumerate(TIERS) if self.base.deepspeed in names), 0)

    @property
    def simplicity(self) -> tuple[bool, int, int, int, float]:
        """Sort key for plans of about the same speed; smaller is simpler.

        In order of priority: nothing offloaded; how the model is split (not at all, by sequences, by matrices or
        experts, by layers); the order of `SIMPLICITY`; fewer ranks per copy of the model; less memory.
        """
        layout, names = self.base.layout, (*SIMPLICITY, self.base.deepspeed)
        kinds = (layout.sequence > 1) + 2 * (layout.tensor > 1) + 2 * (layout.expert > 1) + 4 * (layout.pipeline > 1)
        ranks = layout.tensor * layout.pipeline * layout.sequence
        return self.tier > 0, kinds, names.index(self.base.deepspeed), ranks, self.gpu_gib

    def is_like(self, other: "Plan") -> bool:
        """Return whether two plans differ in nothing that matters: only in the file, as fast, with as much memory."""
        speed, memory = abs(self.speed / other.speed - 1), abs(self.gpu_gib / other.gpu_gib - 1)
        same = self.base.layout == other.base.layout and not self.shortfalls
        same &= self.setup.micro_batch_size == other.setup.micro_batch_size
        same &= self.setup.gradient_checkpointing == other.setup.gradient_checkpointing
        same &= (self.tier, self.fits, self.tight) == (other.tier, other.fits, other.tight)
        return same and speed < COUNTS.alike and memory < 3 * COUNTS.alike


@dataclass(frozen=True)
class SearchResult:
    """The plans for a request."""

    request: PlanRequest
    plans: tuple[Plan, ...]
    """Plans that fit: the best for each file and layout, best first."""
    tight: tuple[Plan, ...]
    """Tight plans for the files and layouts in which nothing fits, except those that a plan that fits makes pointless
    by being as fast with as little memory."""
    rejected: tuple[Plan, ...]
    """For each file that fits in no layout, not even tightly, the plan that exceeds the memory least."""

    @property
    def best(self) -> Plan | None:
        """The recommended plan, or None if nothing is certain to fit."""
        return self.plans[0] if self.plans else None


def ranked(plans: Sequence[Plan]) -> list[Plan]:
    """Return the plans, best first: repeatedly the simplest of those nearly as fast as the fastest remaining plan.

    The cost of splitting a model is less certain than other costs, so a plan with a whole model may be slower by
    `COUNTS.fast_enough` (with adapters, `COUNTS.split_adapters`) for each dimension of the split and still come first.
    """

    def worth(plan: Plan) -> float:
        layout = plan.base.layout
        splits = sum(size > 1 for size in (layout.tensor, layout.pipeline, layout.sequence))
        return plan.speed * (COUNTS.split_adapters if plan.setup.lora else COUNTS.fast_enough) ** splits

    remaining, order = sorted(plans, key=worth, reverse=True), []
    while remaining:
        near = [plan for plan in remaining if worth(plan) >= COUNTS.fast_enough * worth(remaining[0])]
        order.append(min(near, key=lambda plan: plan.simplicity))
        remaining.remove(order[-1])
    return order


def is_dominated(plan: Plan, others: Sequence[Plan]) -> bool:
    """Return whether another plan is at least as fast and needs no more GPU memory and no more host memory."""
    speed, gpu, host = plan.speed, plan.gpu_gib, plan.memory.host_gib
    return any(one.speed >= speed and one.gpu_gib <= gpu and one.memory.host_gib <= host for one in others)


def shortfalls(memory: Memory, cluster: Cluster) -> tuple[str, ...]:
    """Return the resources of which a cluster is likely to have too little, as parts of a sentence."""
    gpu, have = memory.gpu / GIB, cluster.gpu.memory_gib
    loading = " while weights are loaded, whole on every rank" if memory.worst == "loading" else ""
    # Where fragmentation takes what is left of a GPU, rounding does not decide.
    lacking = [f"{gpu:,.1f} GiB of {have:,.1f} on a GPU{loading}"] if gpu > have * (1 + 1e-9) else []
    # Host memory is checked only if its size is known; no NVMe size means no NVMe.
    for need, have, what in (
        (memory.host_gib, cluster.host_memory_gib or math.inf, "host memory"),
        (memory.nvme_gib, cluster.nvme_gib, "NVMe"),
    ):
        if need > COUNTS.usable * have:
            usable = f"{COUNTS.usable * have:,.1f} usable ({COUNTS.usable:.0%} of {have:,.1f})"
            lacking.append(f"{need:,.1f} GiB of {usable} on a node's {what}")
    return tuple(lacking)


def in_words(hours: float) -> str:
    """Return a duration in a readable unit: `20 s`, `40 min`, `4.6 h`."""
    if hours >= 1:
        return f"{hours:,.1f} h"
    return f"{round(60 * hours)} min" if hours >= 1 / 60 else f"{max(1, round(3600 * hours))} s"


@dataclass(frozen=True)
class Workload:
    """The amount of training, and the prices of nodes."""

    tokens: float
    """Total over all epochs."""
    epochs: float = 1.0
    prices: Prices = field(default_factory=Prices)
    about: str = ""
    """The source of the number of tokens, if the user did not give it."""
    document_length: float | None = None
    """As in `TrainingSetup`; None if the data was not read."""
    examples: float | None = None
    """Number per epoch if they are known and not packed."""

    def steps(self, plan: Plan) -> int:
        """Return the number of optimizer steps; the last of an epoch may be smaller."""
        full = self.tokens / self.epochs / plan.setup.tokens_per_step
        each = self.examples / plan.recipe.global_batch_size if self.examples else full
        return math.ceil(self.epochs * math.ceil(each))

    def hours(self, plan: Plan) -> float:
        """Return the hours of training; loading, evaluation and checkpoints are not included."""
        return self.tokens / (plan.speed * plan.setup.world_size) / 3600

    def dollars(self, plan: Plan) -> float | None:
        """Return the price of the run in dollars, or None if the nodes' price is unknown."""
        hourly = self.per_hour(plan.cluster)
        return None if hourly is None else hourly * self.hours(plan)

    def per_hour(self, cluster: Cluster) -> float | None:
        """Return the price of all nodes of a cluster in US dollars per hour, or None if it is unknown."""
        node = self.prices.of_node(cluster.instance)
        return None if node is None else node * cluster.nodes
