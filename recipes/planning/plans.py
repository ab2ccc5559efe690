"""What a plan is: one way to train, what it costs, whether it fits, and which of two is the better one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.planning.anatomy import Anatomy
from recipes.planning.hardware import Cluster
from recipes.planning.memory import Memory
from recipes.planning.setup import Setup
from recipes.planning.time import Time
from recipes.spec.recipe import Recipe

GIB = 2**30
REFUSE = 0.95
"""Of a GPU's memory, or a node's: beyond it a plan does not fit."""
WARN = 0.80
"""Beyond it a plan fits, but a longer row or a fragmented allocator may end it."""
WORTH = 0.95
"""A simpler plan is kept while it has this share of a more complex one's speed."""

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
    ("bf16_states.json",),
)
"""Files of `configs/`, from the simplest of those that suit a layout. A later tier is tried where nothing of the
earlier ones fits: offload last, to the CPU before NVMe; and bf16 states, which round, after what does not."""
SIMPLICITY = tuple(name for tier in TIERS for name in tier)


@dataclass(frozen=True)
class Job:
    """What a plan is wanted for."""

    recipe: Recipe
    """`model.config` holds the dimensions; the method, the global batch and the length of a row are taken from it."""
    anatomy: Anatomy
    cluster: Cluster
    fixed: frozenset[str] = frozenset()
    """Override keys whose value in the recipe is not to be changed."""


@dataclass(frozen=True)
class Plan:
    """One way to train, and what it costs."""

    recipe: Recipe
    """As it would be launched."""
    config: Mapping[str, Any]
    """The DeepSpeed template: the recipe's file, fitted to the cluster's nodes."""
    setup: Setup
    cluster: Cluster
    memory: Memory
    time: Time
    short: tuple[str, ...]
    """What does not fit; empty where it does."""
    tight: bool
    """It fits, and above `WARN`."""

    @property
    def fits(self) -> bool:
        """Whether nothing is short."""
        return not self.short

    @property
    def speed(self) -> float:
        """Tokens per second and GPU."""
        return self.time.tokens_per_second_per_gpu

    @property
    def parts(self) -> Mapping[str, float]:
        """GiB on the fullest GPU at its worst moment, by what they are for."""
        return {name: size / GIB for name, size in self.memory.worst.parts.items() if size}

    @property
    def gpu_gib(self) -> float:
        """All of them."""
        return self.memory.worst.total / GIB

    @property
    def host_gib(self) -> float:
        """Of one node's memory, at its worst moment."""
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
    def simplicity(self) -> tuple:
        """What is compared between plans that are about as fast: the smaller is kept.

        No split of the model before one, of rows before matrices or experts, before layers; with room to spare; the
        order of `SIMPLICITY`; over fewer ranks; with less memory.
        """
        layout = self.recipe.layout
        kinds = (layout.sequence > 1) + 2 * (layout.tensor > 1) + 2 * (layout.expert > 1) + 4 * (layout.pipeline > 1)
        order = SIMPLICITY.index(self.recipe.deepspeed) if self.recipe.deepspeed in SIMPLICITY else len(SIMPLICITY)
        return kinds, self.tight, order, self.setup.copy_size, self.gpu_gib


@dataclass(frozen=True)
class Found:
    """What a search has found."""

    plans: tuple[Plan, ...]
    """Those that fit: of each file and layout the best, best first."""
    misses: tuple[Plan, ...]
    """Of each file that fits in no layout, the plan that is the least too large, in the order of `SIMPLICITY`."""

    @property
    def best(self) -> Plan | None:
        """The plan to take."""
        return self.plans[0] if self.plans else None


def ranked(plans: Sequence[Plan]) -> list[Plan]:
    """Return plans best first: of those nearly as fast as the fastest that is left, the simplest, and so on."""
    left = sorted(plans, key=lambda plan: plan.speed, reverse=True)
    order = []
    while left:
        near = [plan for plan in left if plan.speed >= WORTH * left[0].speed]
        order.append(min(near, key=lambda plan: plan.simplicity))
        left.remove(order[-1])
    return order


def judge(memory: Memory, cluster: Cluster) -> tuple[tuple[str, ...], bool]:
    """Return what does not fit, as parts of a sentence, and whether what fits is tight."""
    gpu, host, nvme = memory.worst.total / GIB, max(memory.host.values()) / GIB, memory.nvme / GIB
    needs = [("a GPU", gpu, cluster.gpu.memory_gib)]
    # A host whose memory is unknown is not judged; where nobody speaks of NVMe, there is none.
    needs += [("a node's host memory", host, cluster.host_memory_gib)] if cluster.host_memory_gib else []
    needs += [("a node's NVMe", nvme, cluster.nvme_gib)] if nvme else []
    short = tuple(f"{need:,.0f} GiB of {have:,.0f} on {what}" for what, need, have in needs if need > REFUSE * have)
    return short, any(need > WARN * have for _, need, have in needs)
