"""What the planner says of a benchmark's cases, beside DeepSpeed's and accelerate's estimators and what was measured.

python -m scripts.benchmarks.foretold    # writes the table into recipes/planning/measurements/README.md
"""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from recipes.planning import strategies
from recipes.planning.hardware import Cluster, find
from recipes.planning.parts import parts
from recipes.planning.plans import GIB, Plan
from recipes.spec import measured
from recipes.spec.marks import between
from scripts.benchmarks.cases import BENCHMARKS, Benchmark, Case, recipe_of

PATH = measured.FOLDER / "README.md"
BEGIN, END = "<!-- foretold: python -m scripts.benchmarks.foretold -->\n", "<!-- /foretold -->\n"
GPU = "H200"
"""Of the predictions, where nothing was measured yet."""
MOMENTS = ("loss", "backward", "gradients", "step")
"""In which a benchmark's peak is measured: neither loading nor saving."""
HEAD = (
    "case", "DeepSpeed", "accelerate", "planner", "allocates", "measured", "error", "tokens/s", "measured", "error",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One case: what was said of it, and what happened."""

    label: str
    deepspeed: float
    """GiB of a GPU by DeepSpeed's estimator of ZeRO's model states; there is one for stage 2, also taken for 1, and
    one for 3."""
    accelerate: float
    """GiB by `accelerate estimate-memory`, in bf16."""
    plan: Plan
    run: Mapping[str, Any] | None
    """What the benchmark wrote; None where nobody has run it."""

    @property
    def allocates(self) -> float:
        """GiB that PyTorch is predicted to allocate while it trains: without CUDA's context and fragmentation."""
        moments = [moment.parts for moment in self.plan.memory.moments if moment.moment in MOMENTS]
        return max(sum(one.values()) - one["runtime"] - one["fragmentation"] for one in moments) / GIB

    @property
    def measured(self) -> Mapping[str, Any] | None:
        """What was measured, where it ran to its end on a GPU."""
        return self.run if self.run and "peak_allocated_gib" in self.run else None

    @property
    def memory_error(self) -> float | None:
        """Share by which what is allocated was predicted too high."""
        return self.allocates / self.measured["peak_allocated_gib"] - 1 if self.measured else None

    @property
    def speed_error(self) -> float | None:
        """Share by which the speed was predicted too high."""
        return self.plan.speed / self.measured["tokens_per_second"] - 1 if self.measured else None

    @property
    def missed(self) -> bool:
        """Whether it was to fit and ran out of memory."""
        return self.plan.fits and (self.run or {}).get("error") == "out of memory"


def main() -> None:
    """Write the table."""
    PATH.write_text(written_into(PATH.read_text(encoding="utf-8")), encoding="utf-8")


def written_into(page: str) -> str:
    """Return the page with the table in its place."""
    return between(page, BEGIN, END, render(list(rows(measured.results()))))


def rows(results: Mapping[str, Mapping[str, Any]]) -> Iterator[Row]:
    """Yield every case whose cost is foretold, with what the results have of it."""
    for benchmark in BENCHMARKS.values():
        if benchmark.foretold:
            yield from _rows(benchmark, results.get(benchmark.name))


def _rows(benchmark: Benchmark, result: Mapping[str, Any] | None) -> Iterator[Row]:
    gpu = find(result["environment"]["gpus"][0] if result else GPU)
    for case in benchmark.cases:
        runs = result["runs"].get(case.label) if result else None
        yield row(case, Cluster(gpu), runs[0] if runs else None)


def row(case: Case, cluster: Cluster, run: Mapping[str, Any] | None = None) -> Row:
    """Return a case on one GPU of a cluster, as `plan.py` and the two estimators see it."""
    # Half a minute of imports, which nobody waits for who only asks what benchmarks there are.
    from accelerate.commands.estimate import estimate_training_usage
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    recipe = recipe_of(case, steps=1, draft=False)
    job = strategies.job(recipe, cluster)
    plan = strategies.cost(job, recipe)
    parameters = job.anatomy.parameters
    if plan.setup.stage == 3:
        largest = parts(job.anatomy, plan.setup)[0].largest
        states = stage3.estimate_zero3_model_states_mem_needs(
            parameters, largest, cpu_offload=False, cpu_offload_params=False
        )[1]
    else:
        states = stage_1_and_2.estimate_zero2_model_states_mem_needs(parameters, cpu_offload=False)[1]
    usual = max(estimate_training_usage(4 * parameters, "bfloat16").values())
    return Row(case.label, states / GIB, usual / GIB, plan, run)


def render(found: list[Row]) -> str:
    """Return the rows as Markdown, and in a sentence how right the planner was."""
    lines = [HEAD, ["---"] * len(HEAD), *(_cells(one) for one in found)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + f"\n\n{summary(found)}\n"


def _cells(one: Row) -> list[str]:
    planner = f"{one.plan.gpu_gib:.1f}{'' if one.plan.fits else ', does not fit'}"
    memory = speed = "-"
    if one.measured:
        memory, speed = f"{one.measured['peak_allocated_gib']:.1f}", f"{one.measured['tokens_per_second']:,.0f}"
    elif one.run:
        memory = one.run.get("error", "-")
    return [
        one.label, f"{one.deepspeed:.1f}", f"{one.accelerate:.1f}", planner, f"{one.allocates:.1f}", memory,
        _percent(one.memory_error), f"{one.plan.speed:,.0f}", speed, _percent(one.speed_error),
    ]  # fmt: skip


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{error:+.1%}"


def summary(found: list[Row]) -> str:
    """Return the median and the worst error, and what was to fit and did not."""
    ran = [one for one in found if one.measured]
    missed = [one.label for one in found if one.missed]
    said = f"{', '.join(missed)} was to fit and ran out of memory." if missed else ""
    if not ran:
        return said or f"None of the {len(found)} was run on a GPU yet."
    memory, speed = (
        [abs(getattr(one, name)) for one in ran if getattr(one, name) is not None]
        for name in ("memory_error", "speed_error")
    )
    return (
        f"Over {len(ran)} of {len(found)} runs memory is off by {statistics.median(memory):.1%} in the median and "
        f"{max(memory):.1%} at worst, speed by {statistics.median(speed):.1%} and {max(speed):.1%}. "
        f"{said or 'Nothing that was to fit ran out of memory.'}"
    )


if __name__ == "__main__":
    main()
