"""The benchmarks, the contenders that each one compares, and the table of their results. Standard library only."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..recipe import overrides, pages
from ..recipe.files import Json, JsonView
from ..recipe.gpus import peak_flops
from ..recipe.recipe import Data, Recipe, Schedule, Wandb

WARM_UP = 10
"""Warm-up steps, not timed: allocator, ZeRO's trace, compilation, autotuning."""
STEPS = 20
"""Steps that are timed."""
FEW = (3, 5)
"""(warm-up, timed) steps where memory matters and the last percent of speed does not."""
LIMIT = 460
"""Seconds, below 8 minutes, after which a benchmark stops its current run and starts no more; half with `--quick`."""
CASE = 180
"""Seconds after which one run of a contender is stopped, so that a hanging run does not take the others' time."""
ALL = 28
"""Minutes for all benchmarks: the rest of half an hour on a rented GPU after the installation."""


@dataclass(frozen=True)
class Case:
    """One contender: a line of the result's table."""

    label: str
    peer: Literal["recipe", "plain", "trainer", "sft_trainer"]
    """The project's run; a plain PyTorch loop; `transformers.Trainer` and TRL's `SFTTrainer`, with their defaults."""
    page: str = "llama3-1b"
    variant: str = "full"
    changes: tuple[str, ...] = ()
    """Overrides, as on the command line."""
    states: Literal["fp32", "bf16"] = "fp32"
    """For the plain loop: the precision of Adam's master weights and states."""
    compiled: bool = False
    """For the plain loop: compile the model."""
    on_cpu: bool = True
    """True if the draft of this case can run on a CPU."""


@dataclass(frozen=True)
class Benchmark:
    """Contenders that take turns, A B B A, on the same sequences."""

    name: str
    about: str
    cases: tuple[Case, ...]
    grows: bool = False
    """Double the sequence length until a contender runs out of memory; the table gives the longest that trained."""
    estimates: bool = False
    """Each case is compared with the planner's estimate (`estimates.py`). It runs once and for `FEW` steps: its peak is
    the same at every step, and its speed has to be known to a few percent only."""


SIZE = ("sequence_length=4096", "micro_batch_size=4", "global_batch_size=4")
FAST = (*SIZE, "gradient_checkpointing=false")
ROOMY = ("sequence_length=4096", "micro_batch_size=2", "global_batch_size=2")


def _estimated(page: str, variant: str, config: str, length: int, micro_batch: int, checkpointing: bool) -> Case:
    return Case(
        f"{page} {variant}, {config}, {micro_batch} x {length:,}{', checkpointing' if checkpointing else ''}",
        "recipe",
        page,
        variant,
        (f"deepspeed={config}.json", f"sequence_length={length}", f"micro_batch_size={micro_batch}",
         f"global_batch_size={micro_batch}", f"gradient_checkpointing={str(checkpointing).lower()}"),
    )  # fmt: skip


LORA = Case("recipe", "recipe", "llama3-8b", "lora", (*ROOMY, "gradient_checkpointing=false"))
QLORA = Case("recipe", "recipe", "llama3-8b", "qlora", ROOMY)
OFFLOADED = Case("in host memory", "recipe", "llama3-3b", "full", (*ROOMY, "deepspeed=zero2_offload.json"))
BENCHMARKS = {
    one.name: one
    for one in (
        Benchmark(
            "full_1b",
            "all weights of Llama 3.2 1B, documents packed to 4,096 tokens",
            (
                Case("recipe", "recipe", changes=(*FAST, "deepspeed=zero1.json")),
                Case("recipe, compiled", "recipe", changes=(*FAST, "deepspeed=zero1.json", "compile=regional")),
                Case("plain loop, compiled", "plain", changes=FAST, compiled=True),
                Case("Trainer", "trainer", changes=FAST),
                Case("SFTTrainer", "sft_trainer", changes=FAST),
            ),
        ),
        Benchmark(
            "full_8b",
            "all weights of Llama 3.1 8B on one GPU",
            (
                Case("recipe, bf16 states", "recipe", "llama3-8b", "full", (*ROOMY, "deepspeed=bf16_states.json")),
                Case(
                    "recipe, bf16 states, ZeRO-1",
                    "recipe",
                    "llama3-8b",
                    "full",
                    (*ROOMY, "deepspeed=zero1_bf16_states.json"),
                ),
                Case(
                    "recipe, fp32 states",
                    "recipe",
                    "llama3-8b",
                    "full",
                    ("sequence_length=4096", "micro_batch_size=1", "global_batch_size=1", "deepspeed=zero3.json"),
                ),
                Case("plain loop, bf16 states", "plain", "llama3-8b", "full", ROOMY, states="bf16", compiled=True),
            ),
        ),
        Benchmark(
            "lora_8b",
            "adapters of rank 16 on all linear layers of Llama 3.1 8B, no checkpointing",
            (
                LORA,
                replace(LORA, label="recipe, fused adapters", changes=(*LORA.changes, "lora.fused=true")),
                replace(LORA, label="recipe, compiled", changes=(*LORA.changes, "compile=regional")),
                replace(LORA, label="Trainer", peer="trainer"),
                replace(LORA, label="SFTTrainer", peer="sft_trainer"),
            ),
        ),
        Benchmark(
            "zero_tax",
            "ZeRO-0 to 3 on one rank, and the same without DeepSpeed",
            (
                Case("no DeepSpeed", "plain", changes=FAST),
                *(Case(f"ZeRO-{n}", "recipe", changes=(*FAST, f"deepspeed=zero{n}.json")) for n in range(4)),
            ),
        ),
        Benchmark(
            "planner_error",
            "the planner's estimates and measurements, 1B to 4B",
            (
                _estimated("llama3-1b", "full", "zero1", 4096, 4, False),
                _estimated("llama3-1b", "full", "zero2", 8192, 2, True),
                _estimated("llama3-1b", "full", "zero3", 4096, 8, True),
                _estimated("llama3-3b", "full", "zero2", 4096, 2, False),
                _estimated("llama3-3b", "lora", "zero1", 8192, 1, False),
                _estimated("qwen3-4b", "lora", "zero3", 4096, 4, True),
                _estimated("llama3-3b", "qlora", "zero2", 4096, 2, False),
            ),
            estimates=True,
        ),
        Benchmark(
            "planner_error_8b",
            "the same, 8B",
            (
                _estimated("llama3-8b", "lora", "zero2", 4096, 2, False),
                _estimated("llama3-8b", "lora", "zero3", 8192, 2, True),
                _estimated("llama3-8b", "lora", "zero2", 4096, 4, True),
                _estimated("llama3-8b", "qlora", "zero2", 8192, 1, False),
                _estimated("llama3-8b", "qlora", "zero1", 4096, 4, True),
                _estimated("llama3-8b", "full", "bf16_states", 4096, 2, True),
                _estimated("llama3-8b", "full", "zero3", 4096, 1, True),
            ),
            estimates=True,
        ),
        Benchmark(
            "qlora_8b",
            "QLoRA of rank 16 on all linear layers of Llama 3.1 8B, with checkpointing",
            (
                QLORA,
                replace(QLORA, label="recipe, selective", changes=(*ROOMY, "gradient_checkpointing=selective")),
                replace(QLORA, label="Trainer", peer="trainer"),
            ),
        ),
        Benchmark(
            "attention",
            "attention implementations on packed sequences of 8,192 tokens",
            tuple(
                Case(name, "recipe", changes=(*FAST, "sequence_length=8192", "micro_batch_size=1",
                                              "global_batch_size=1", f"model.attention={name}"), on_cpu=on_cpu)
                for name, on_cpu in (("varlen", True), ("sdpa", True), ("flex_attention", False),
                                     ("flash_attention_3", False))
            ),
        ),
        Benchmark(
            "packing",
            "the same documents, packed and one per sequence: non-padding tokens per second",
            (
                Case("packed", "recipe", changes=FAST),
                Case("padded", "recipe", changes=(*FAST, "packing=false", "tiled_loss=true")),
            ),
        ),
        Benchmark(
            "long_context",
            "the longest sequence that trains, adapters on Llama 3.1 8B; doubled from 8,192 tokens",
            (
                Case("recipe, tiled", "recipe", "llama3-8b", "lora",
                     ("micro_batch_size=1", "global_batch_size=1", "tiled_loss=true", "tiled_mlp=true")),
                Case("recipe", "recipe", "llama3-8b", "lora",
                     ("micro_batch_size=1", "global_batch_size=1", "tiled_loss=false")),
            ),
            grows=True,
        ),
        Benchmark(
            "offload",
            "Adam's states in host memory, Llama 3.2 3B",
            (
                Case("on the GPU", "recipe", "llama3-3b", "full", (*ROOMY, "deepspeed=zero2.json")),
                OFFLOADED,
                replace(
                    OFFLOADED, label="in host memory, on any cores", changes=(*OFFLOADED.changes, "numa_binding=false")
                ),
            ),
        ),
    )
}  # fmt: skip
"""By name, in the order in which the whole list runs: what matters most comes first."""


def recipe_of(case: Case, steps: int, draft: bool) -> Recipe:
    """Return the recipe of a case, which trains `steps` steps on sequences that the benchmark makes."""
    recipe = overrides.apply(pages.find(case.page, case.variant), case.changes)
    if draft:
        recipe = replace(
            recipe,
            sequence_length=recipe.sequence_length // 32,
            micro_batch_size=min(2, recipe.micro_batch_size),
            global_batch_size=min(2, recipe.micro_batch_size),
            compile="off",
        )
    return replace(
        recipe,
        data=Data(path="made by the benchmark"),
        schedule=Schedule("constant", 0),
        max_steps=steps,
        logging_steps=10,
        save_steps=0,
        eval_steps=None,
        wandb=Wandb("disabled"),
    )


COLUMNS = (
    "tokens/s", "spread", "of the first", "MFU", "of this machine's matrix product", "peak GiB", "reserved GiB",
    "reads per step",
)  # fmt: skip


def table(result: Json) -> str:
    """Return a benchmark's results as Markdown: medians over all timed steps of all runs, or the error.

    `spread` is half of the range from the 10th to the 90th percentile of the steps, as a share of the median. Columns
    without measurements are left out.
    """
    if result.get("longest"):
        lines = ["| | longest sequence that trained, tokens | next length |", "|---|---|---|"]
        return "\n".join([*lines, *(f"| {name} | {n or ''} | {why} |" for name, (n, why) in result["longest"].items())])
    measured = cells(result)
    rows: list[list[str]] = []
    for name, runs in result["runs"].items():
        why = runs[0].get("error", "") if runs else "not reached"
        rows.append([name, *measured.get(name, [*[""] * (len(COLUMNS) - 1), why])])
    return markdown(["", *COLUMNS], rows)


def completed_runs(result: JsonView, label: str) -> list[Json]:
    """Return a contender's runs that ended without an error."""
    return [run for run in result["runs"].get(label, []) if "error" not in run]


def tokens_per_second(runs: Sequence[JsonView]) -> float:
    """Return a contender's tokens per second and GPU, from the median of all steps of its runs."""
    return runs[0]["tokens_per_step"] / statistics.median(second for run in runs for second in run["step_seconds"])


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table without its empty columns."""
    filled = [number for number in range(len(head)) if any(row[number] for row in rows)]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line[number] for number in filled) + " |" for line in lines)


def cells(result: Json) -> dict[str, list[str]]:
    """Return the cells of each contender with completed runs, in the order of `COLUMNS`; unmeasured cells are empty."""
    rows: dict[str, list[str]] = {}
    first, gpus = None, result["environment"]["gpus"]
    peak = peak_flops(gpus[0]) if gpus else None
    for name in result["runs"]:
        if not (ended := completed_runs(result, name)):
            continue
        steps = [seconds for run in ended for seconds in run["step_seconds"]]
        low, *_, high = statistics.quantiles(steps, n=10)
        tokens = tokens_per_second(ended)
        first = first or tokens
        flops = ended[0]["flops_per_step"] / statistics.median(steps)
        rows[name] = [
            f"{tokens:,.0f}", f"{(high - low) / 2 / statistics.median(steps):.1%}", f"{tokens / first:.3f}",
            _share(flops, peak), _share(flops, result["limits"].get("matrix_flops")),
            _memory(ended, "peak_allocated_gib"), _memory(ended, "peak_reserved_gib"),
            f"{max(run['reads_per_step'] for run in ended)}",
        ]  # fmt: skip
    return rows


def heading(result: Json) -> str:
    """Return a line with the benchmark, the hardware, the date and the versions."""
    where = ", ".join(result["environment"]["gpus"]) or f"{result['environment']['cpu_count']} CPU cores"
    packages = result["environment"]["packages"]
    kind = "DRAFT on shrunken models, no measure of speed: " if result["draft"] else ""
    return (
        f"{kind}{result['benchmark']} ({result['about']}), {where}, {result['date']}, "
        f"torch {packages['torch']}, deepspeed {packages['deepspeed']}, transformers {packages['transformers']}"
    )


def _share(value: float, of: float | None) -> str:
    return f"{value / of:.1%}" if of else ""


def _memory(runs: Sequence[Json], key: str) -> str:
    known = [run[key] for run in runs if key in run]
    return f"{max(known):.1f}" if known else ""
