"""Compares the planner's estimates of a benchmark's cases with DeepSpeed's, accelerate's and measurements."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_recipes.benchmarks.cases import BENCHMARKS, Case, markdown, recipe_of
from deepspeed_recipes.planning.cost.states import stage_shards
from deepspeed_recipes.planning.hardware.cluster import Cluster
from deepspeed_recipes.planning.hardware.gpus import find
from deepspeed_recipes.planning.search import strategies
from deepspeed_recipes.planning.search.plans import GIB, Plan

GPU = "H200"
"""The GPU to predict for where nothing has been measured yet."""
DOCUMENTS = 1150.0
"""Tokens of a document on average: the mean of `measure.documents`' log-normal lengths, 900 exp(0.7^2 / 2)."""
MOMENTS = ("loss", "backward", "gradients", "step")
"""The phases in which a benchmark measures its peak, without loading and saving."""
HEAD = (
    "case", "DeepSpeed", "accelerate", "planner", "allocates", "measured", "error", "tokens/s", "measured", "error",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A line of the table: one case, with its estimates and measurements."""

    label: str
    deepspeed: float
    """GiB per GPU by DeepSpeed's estimators of ZeRO's model states: one for stage 2, used for stage 1 too, and one for
    3."""
    accelerate: float
    """GiB by `accelerate estimate-memory`, in bf16."""
    plan: Plan
    run: Mapping[str, Any] | None
    """The benchmark's result, or None if the case has not run."""

    @property
    def allocates(self) -> float:
        """GiB that PyTorch is predicted to allocate during training: without CUDA's context and fragmentation."""
        moments = [held for moment, held in self.plan.memory.moments.items() if moment in MOMENTS]
        return max(sum(one.values()) - one["runtime"] - one["fragmentation"] for one in moments) / GIB

    @property
    def measured(self) -> Mapping[str, Any] | None:
        """The measurements, if the run was completed on a GPU."""
        return self.run if self.run and "peak_allocated_gib" in self.run else None

    @property
    def memory_error(self) -> float | None:
        """Relative error of the predicted memory, positive if the prediction is too high."""
        return self.allocates / self.measured["peak_allocated_gib"] - 1 if self.measured else None

    @property
    def speed_error(self) -> float | None:
        """Relative error of the predicted speed, positive if the prediction is too high."""
        return self.plan.speed / self.measured["tokens_per_second"] - 1 if self.measured else None

    @property
    def ran_out_of_memory(self) -> bool:
        """True if the case ran out of memory although it was predicted to fit."""
        return not self.plan.shortfalls and (self.run or {}).get("error") == "out of memory"


def rows(results: Mapping[str, Mapping[str, Any]]) -> Iterator[Row]:
    """Yield a line for every case with an estimate, with its results."""
    for benchmark in BENCHMARKS.values():
        if not benchmark.estimates:
            continue
        result = results.get(benchmark.name)
        gpu = find(result["environment"]["gpus"][0] if result else GPU)
        for case in benchmark.cases:
            runs = result["runs"].get(case.label) if result else None
            yield row(case, Cluster(gpu), runs[0] if runs else None)


def row(case: Case, cluster: Cluster, run: Mapping[str, Any] | None = None) -> Row:
    """Return the estimates of `ds-recipes plan` and of the two estimators for a case on one GPU of a cluster."""
    # Imported here, since the import takes half a minute and listing the benchmarks does not need it.
    from accelerate.commands.estimate import estimate_training_usage
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    recipe = recipe_of(case, steps=1, draft=False)
    request = strategies.plan_request(recipe, cluster, document_length=DOCUMENTS)
    plan = strategies.evaluate(request, recipe)
    parameters = request.profile.parameters
    if plan.setup.zero_stage == 3:
        largest = stage_shards(request.profile, plan.setup)[0].largest_module
        states = stage3.estimate_zero3_model_states_mem_needs(
            parameters, largest, cpu_offload=False, cpu_offload_params=False
        )[1]
    else:
        states = stage_1_and_2.estimate_zero2_model_states_mem_needs(parameters, cpu_offload=False)[1]
    usual = max(estimate_training_usage(4 * parameters, "bfloat16").values())
    return Row(case.label, states / GIB, usual / GIB, plan, run)


def render(found: list[Row]) -> str:
    """Return a Markdown table without the columns that were not measured, and the planner's error in a sentence."""
    return f"{markdown(HEAD, [_cells(one) for one in found])}\n\n{summary(found)}\n"


def _cells(one: Row) -> list[str]:
    planner = f"{one.plan.gpu_gib:.1f}{', does not fit' if one.plan.shortfalls else ''}"
    memory = speed = ""
    if one.measured:
        memory, speed = f"{one.measured['peak_allocated_gib']:.1f}", f"{one.measured['tokens_per_second']:,.0f}"
    elif one.run:
        memory = one.run.get("error", "")
    return [
        one.label, f"{one.deepspeed:.1f}", f"{one.accelerate:.1f}", planner, f"{one.allocates:.1f}", memory,
        _percent(one.memory_error), f"{one.plan.speed:,.0f}", speed, _percent(one.speed_error),
    ]  # fmt: skip


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:+.1%}"


def summary(found: list[Row]) -> str:
    """Return the median and the worst error, and the cases that ran out of memory despite the prediction."""
    ran = [one for one in found if one.measured]
    failed = [one.label for one in found if one.ran_out_of_memory]
    failures = f"Predicted to fit, but ran out of memory: {', '.join(failed)}." if failed else ""
    if not ran:
        return failures or f"None of the {len(found)} cases has been run on a GPU yet."
    memory, speed = (
        [abs(getattr(one, name)) for one in ran if getattr(one, name) is not None]
        for name in ("memory_error", "speed_error")
    )
    return (
        f"Over {len(ran)} of {len(found)} runs memory is off by {statistics.median(memory):.1%} in the median and "
        f"{max(memory):.1%} at worst, speed by {statistics.median(speed):.1%} and {max(speed):.1%}. "
        f"{failures or 'No case that was predicted to fit ran out of memory.'}"
    )
