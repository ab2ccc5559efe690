"""What a plan is: one way to train with its cost, whether it fits, and which of two plans is better."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...recipe.deepspeed_file import DeepSpeedFile
from ...recipe.recipe import Recipe
from ..cost.memory.peak_memory import Memory
from ..cost.ranges import memory_range, speed_range
from ..cost.time.step_time import StepTime
from ..cost.training_setup import TrainingSetup
from ..hardware.cluster import Cluster
from ..model_profile.profile import ModelProfile

GIB = 2**30
REFUSE = 0.95
"""Of a node's memory and NVMe: a plan that is likely to need more does not fit. Of a GPU, whose needs have a range, all
counts, though such a plan comes last among the tight: 14 of the 15 published runs that were likely to fill 95 to 100 %
of one ran (2026-11-25)."""
FAST_ENOUGH = 0.95
"""A simpler plan is preferred if it has this share of a more complex one's speed."""

TIERS = (
    (
        "sequence_parallel.json",
        "zero0.json",
        "zero1.json",
        "zero2.json",
        "zero3.json",
        "zero3_adapters.json",
        "zero3_moe.json",
        "zero3_hpz.json",
        "expert_parallel.json",
        "tensor_parallel.json",
        "pipeline.json",
    ),
    ("zero2_offload.json", "zero3_offload.json"),
    ("zero3_offload_params.json",),
    ("zero3_nvme.json",),
    ("zero1_bf16_states.json", "bf16_states.json"),
)
"""Files of `configs/`, in each tier from the simplest: offloading comes late, to the CPU before NVMe. Of a tier after
the first in which anything fits, only the best plan is kept."""
LAST_RESORT = TIERS[-1]
"""bf16 states, which round: tried only where nothing else fits for sure."""
SIMPLICITY = tuple(name for tier in TIERS for name in tier)


@dataclass(frozen=True)
class PlanRequest:
    """What to plan: a recipe and its model on a cluster."""

    recipe: Recipe
    """With the dimensions in `model.config`; its method, global batch and sequence length are kept."""
    profile: ModelProfile
    cluster: Cluster
    fixed: frozenset[str] = frozenset()
    """Override keys whose value in the recipe must not change."""
    document_length: float | None = None
    """As in `TrainingSetup`, where the data was read."""


@dataclass(frozen=True)
class Plan:
    """One way to train, with its cost."""

    recipe: Recipe
    """As it would be launched."""
    file: DeepSpeedFile
    """The DeepSpeed template: the recipe's file, adapted to the cluster's nodes."""
    setup: TrainingSetup
    cluster: Cluster
    memory: Memory
    time: StepTime
    shortfalls: tuple[str, ...]
    """What it is likely to need more of than there is, as parts of a sentence; empty where it fits or is tight."""

    @property
    def fits(self) -> bool:
        """Whether there is enough of everything, of a GPU's memory for the high value of the range too."""
        return not self.shortfalls and not self.tight

    @property
    def tight(self) -> bool:
        """Whether there is likely to be enough, but published runs of its kind needed up to more than there is."""
        return not self.shortfalls and self.gpu_gib_range[1] > self.cluster.gpu.memory_gib

    @property
    def speed(self) -> float:
        """Tokens per second and GPU."""
        return self.time.tokens_per_second_per_gpu

    @property
    def components(self) -> Mapping[str, float]:
        """GiB on the fullest GPU at its fullest moment, by what they are for."""
        return {name: size / GIB for name, size in self.memory.worst.components.items() if size}

    @property
    def gpu_gib(self) -> float:
        """The sum of the components."""
        return self.memory.worst.total / GIB

    @property
    def gpu_gib_range(self) -> tuple[float, float]:
        """The low and the high value of `gpu_gib`, by the runs of its kind that were published (`cost.ranges`)."""
        factors = memory_range(self.setup)
        return factors.low * self.gpu_gib, factors.high * self.gpu_gib

    @property
    def speed_range(self) -> tuple[float, float]:
        """The low and the high value of `speed`."""
        factors = speed_range(self.setup)
        return factors.low * self.speed, factors.high * self.speed

    @property
    def host_gib(self) -> float:
        """Of one node's memory, at its fullest moment."""
        return max(self.memory.host.values()) / GIB

    @property
    def nvme_gib(self) -> float:
        """Of one node's drives."""
        return self.memory.nvme / GIB

    @property
    def checkpoint_gib(self) -> float:
        """On disk, of one checkpoint."""
        return self.memory.checkpoint / GIB

    @property
    def share(self) -> float:
        """Of a GPU's memory."""
        return self.gpu_gib / self.cluster.gpu.memory_gib

    @property
    def tier(self) -> int:
        """Which of `TIERS` its file is in; files of one's own are in the first."""
        return next((number for number, names in enumerate(TIERS) if self.recipe.deepspeed in names), 0)

    @property
    def simplicity(self) -> tuple:
        """What decides between plans of about the same speed; smaller is simpler.

        In this order: nothing offloaded; a model that is not split, then one split by sequences, by matrices or by
        experts, by layers; the order of `SIMPLICITY`; fewer ranks per copy of the model; less memory.
        """
        layout = self.recipe.layout
        kinds = (layout.sequence > 1) + 2 * (layout.tensor > 1) + 2 * (layout.expert > 1) + 4 * (layout.pipeline > 1)
        order = SIMPLICITY.index(self.recipe.deepspeed) if self.recipe.deepspeed in SIMPLICITY else len(SIMPLICITY)
        return self.tier > 0, kinds, order, self.setup.model_parallel_size, self.gpu_gib


@dataclass(frozen=True)
class SearchResult:
    """The plans for a request."""

    plans: tuple[Plan, ...]
    """Those that fit: the best of each file and layout, best first."""
    tight: tuple[Plan, ...]
    """Those that are tight, of files and layouts in which none fits, unless one that fits is as fast and as lean."""
    rejected: tuple[Plan, ...]
    """For each file that fits in no layout, not even tightly, the plan that comes nearest to fitting."""

    @property
    def best(self) -> Plan | None:
        """The plan to take; None where nothing fits for sure."""
        return self.plans[0] if self.plans else None


def ranked(plans: Sequence[Plan]) -> list[Plan]:
    """Return plans best first: of those nearly as fast as the fastest remaining one the simplest, and so on.

    What a split costs is known less well than the rest: a whole model may be slower by as much again.
    """

    def worth(plan: Plan) -> float:
        return plan.speed * (FAST_ENOUGH if plan.setup.model_parallel_size > 1 else 1.0)

    remaining = sorted(plans, key=worth, reverse=True)
    order = []
    while remaining:
        near = [plan for plan in remaining if worth(plan) >= FAST_ENOUGH * worth(remaining[0])]
        order.append(min(near, key=lambda plan: plan.simplicity))
        remaining.remove(order[-1])
    return order


def is_dominated(plan: Plan, others: Sequence[Plan]) -> bool:
    """Return whether another plan is as fast and takes no more memory, neither of a GPU nor of the host."""
    return any(
        other.speed >= plan.speed and other.gpu_gib <= plan.gpu_gib and other.host_gib <= plan.host_gib
        for other in others
    )


def shortfalls(memory: Memory, cluster: Cluster) -> tuple[str, ...]:
    """Return what a cluster is likely to have too little of, as parts of a sentence."""
    gpu, host, nvme = memory.worst.total / GIB, max(memory.host.values()) / GIB, memory.nvme / GIB
    loading = " while weights are loaded, whole on every rank" if memory.worst.moment == "loading" else ""
    lacking = []
    if gpu > cluster.gpu.memory_gib:
        lacking.append(f"{gpu:,.1f} GiB of {cluster.gpu.memory_gib:,.1f} on a GPU{loading}")
    # Host memory counts only where it is known; where no NVMe is named, there is none.
    needs = [("a node's host memory", host, cluster.host_memory_gib)] if cluster.host_memory_gib else []
    needs += [("a node's NVMe", nvme, cluster.nvme_gib)] if nvme else []
    lacking += [
        f"{need:,.1f} GiB of {REFUSE * have:,.1f} usable ({REFUSE:.0%} of {have:,.1f}) on {what}"
        for what, need, have in needs
        if need > REFUSE * have
    ]
    return tuple(lacking)
