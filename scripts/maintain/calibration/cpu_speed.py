"""Compares predicted and measured step times of CPU ranks.

    python -m scripts.maintain.calibration.cpu_speed machine_NAME.json

The predictions come from this machine's `doctor --measure` alone. The cases were fixed before any error was seen; the
cases at odd places of the list, counted from 0, judge: they were read after the last change of a term.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from itertools import pairwise
from pathlib import Path

from deepspeed_recipes.benchmarks.overhead import Contender
from deepspeed_recipes.launching import paths
from deepspeed_recipes.launching.command import deepspeed_command, rank_environment
from deepspeed_recipes.machine.children import killed_with_this_process
from deepspeed_recipes.planning.hardware import machine_file
from deepspeed_recipes.planning.hardware.cluster import of_cpus
from deepspeed_recipes.planning.hardware.machine_file import Machine
from deepspeed_recipes.planning.search import strategies
from deepspeed_recipes.planning.search.plans import Plan
from deepspeed_recipes.recipe import overrides, pages
from deepspeed_recipes.recipe.files import Json, JsonView
from deepspeed_recipes.recipe.project import SAMPLES
from deepspeed_recipes.recipe.recipe import Draft, Recipe, Schedule, Wandb
from deepspeed_recipes.recipe.run_folder import RunFolder, read_json, write_json, write_recipe

from . import MEASUREMENTS

MACHINE = MEASUREMENTS / "machine_cpu.json"
"""The measurements of the first machine; its step times are in `planner_speed_cpu.json`."""
MACHINES = {
    "The first machine": MACHINE,
    "The second machine, which has no instructions for bf16": MACHINE.with_name("machine_cpu_without_bf16.json"),
}
"""The machines that were measured; the terms were found on the first one."""
STEPS, WARM_UP = 25, 5
"""Steps of a run, and those of them that are not counted."""
FASTEST = 4
"""The counted step, of 20: the fastest but 4. On a shared machine others slow down some of them."""
STUDENT = 2.145
"""The 97.5 % quantile of Student's t for 15 cases."""
LENGTH = 256
CHAT_LENGTH = 76
"""Mean length of a packed document of the sample, in tokens (`documents.estimates.DOCUMENTS`)."""


@dataclass(frozen=True)
class Case:
    """A run whose step time is predicted."""

    model: str
    """`small` and `large`: drafts of Llama 3 and Qwen3; `tiny`: the model that ships with the project."""
    variant: str
    config: str
    ranks: int = 2
    changes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The case in words."""
        words = (self.model, self.variant, self.config.removesuffix(".json"), *self.changes)
        return ", ".join((*words, f"{self.ranks} rank{'s' * (self.ranks > 1)}"))


MODELS = {
    "small": ("llama3-8b", Draft(True, 8, 128)),
    "tiny": ("tiny", None),
    "large": ("qwen3-8b", Draft(True, 6, 512)),
}
UNPACKED, BF16 = "packing=false", "precision=bf16"
CASES = (
    Case("small", "full", "zero0.json", 1),
    Case("small", "full", "zero1.json"),
    Case("small", "full", "zero3.json"),
    Case("small", "lora", "zero2.json"),
    Case("small", "full", "zero3.json", 2, (UNPACKED,)),
    Case("small", "full", "pipeline.json", 2, ("layout.pipeline=2", "global_batch_size=8")),
    Case("tiny", "full", "zero3.json"),
    Case("tiny", "lora", "zero2.json"),
    Case("tiny", "full", "zero0.json"),
    Case("tiny", "full", "zero1.json", 1),
    Case("tiny", "full", "zero2_offload.json"),
    Case("tiny", "full", "zero2.json", 2, ("global_batch_size=16",)),
    Case("tiny", "full", "sequence_parallel.json", 2, ("layout.sequence=2",)),
    Case("tiny", "full", "zero1.json", 2, ("layout.tensor=2",)),
    Case("tiny", "full", "pipeline.json", 2, ("layout.pipeline=2", "global_batch_size=8")),
    Case("tiny", "full", "zero3.json", 2, (BF16,)),
    Case("tiny", "lora", "zero3.json", 2, (UNPACKED,)),
    Case("tiny", "full", "zero1.json", 2, ("gradient_checkpointing=true",)),
    Case("large", "full", "zero1.json", 1, (UNPACKED,)),
    Case("large", "full", "zero2.json"),
    Case("large", "lora", "zero1.json", 2, (BF16,)),
    Case("large", "full", "zero3.json"),
    Case("large", "full", "zero1.json", 2, ("layout.tensor=2",)),
    Case("large", "full", "zero3_offload.json"),
    Case("large", "lora", "zero3.json", 2, ("gradient_checkpointing=true",)),
    Case("large", "full", "pipeline.json", 2, ("layout.pipeline=2", "global_batch_size=4")),
    Case("large", "full", "zero1.json", 2, (BF16,)),
    Case("large", "full", "sequence_parallel.json", 2, ("layout.sequence=2", UNPACKED)),
    Case("small", "lora", "zero0.json", 1),
    Case("tiny", "full", "zero1.json", 2, (UNPACKED, "sequence_length=512")),
)


def cases_of(machine: Machine) -> tuple[Case, ...]:
    """Return the cases that a machine's CPU can train."""
    return tuple(case for case in CASES if machine.product_rates("bf16") or BF16 not in case.changes)


def result_of(machine: Path) -> Path:
    """Return the file with the step times of a machine."""
    return machine.with_name(machine.name.replace("machine", "planner_speed"))


@dataclass(frozen=True)
class Comparison:
    """A case's predicted and measured seconds of a step."""

    case: Case
    predicted: float
    measured: float
    factors: tuple[float, float]
    """The range of measured / predicted speeds that the plan prints."""
    judges: bool

    @property
    def ratio(self) -> float:
        """Predicted / measured seconds, which is measured / predicted speed."""
        return self.predicted / self.measured

    @property
    def inside(self) -> bool:
        """True if the measured speed is in the printed range."""
        return self.factors[0] <= self.ratio <= self.factors[1]


def recipe_of(case: Case, folder: Path) -> Recipe:
    """Return the recipe of a case; `folder` receives documents that fill a sequence each, for cases without packing."""
    page, draft = MODELS[case.model]
    recipe = pages.find("tiny", case.variant)
    micro_batch = 1 if case.model == "large" else 4
    shared = 2 if {"layout.tensor=2", "layout.sequence=2", "layout.pipeline=2"} & {*case.changes} else 1
    recipe = replace(
        recipe,
        data=replace(recipe.data, validation=None, metric="loss"),
        deepspeed=case.config,
        learning_rate=1e-4,
        schedule=Schedule("constant", 0),
        sequence_length=LENGTH,
        micro_batch_size=micro_batch,
        global_batch_size=micro_batch * case.ranks // shared,
        max_steps=STEPS,
        logging_steps=1,
        eval_steps=None,
        save_steps=0,
        wandb=Wandb("disabled"),
    )
    if draft:
        recipe = replace(recipe, model=pages.find(page, "full").model, draft=draft)
    recipe = overrides.apply(recipe, case.changes)
    if not recipe.packing:
        file = folder / f"{recipe.sequence_length}.jsonl"
        if not file.exists():
            file.write_text("".join(json.dumps(one) + "\n" for one in full_documents(recipe.sequence_length)))
        recipe = replace(recipe, data=replace(recipe.data, path=str(file)))
    return paths.locate(recipe)


def full_documents(length: int) -> list[Json]:
    """Return conversations of `length` tokens, less the few of the template."""
    from transformers import AutoTokenizer

    from deepspeed_recipes.recipe.samples import TEXT, TINY_MODEL

    reader = AutoTokenizer.from_pretrained(TINY_MODEL)
    texts = [json.loads(line)["text"] for line in Path(SAMPLES / TEXT.path).read_text().splitlines()]
    tokens = reader("\n".join(texts), add_special_tokens=False)["input_ids"]
    parts = [reader.decode(tokens[start : start + length - 16]) for start in range(0, 400 * length, length)]
    turns = [({"role": "user", "content": "Go on."}, {"role": "assistant", "content": part}) for part in parts]
    return [{"messages": list(pair)} for pair in turns]


def measured(case: Case, folder: Path) -> float:
    """Return the seconds of a step, without those that something else slowed down."""
    recipe = recipe_of(case, folder.parent)
    run = RunFolder(folder)
    write_recipe(run, recipe)
    environment = rank_environment(case.ranks, 0) | {"HF_HUB_OFFLINE": "1"}
    ran = Contender(deepspeed_command(run, case.ranks), environment, run.metrics, folder.with_suffix(".log"))
    ran.start()
    assert ran.process
    with killed_with_this_process(ran.process.pid):
        try:
            while not ran.turns or ran.turns[-1].record["step"] < STEPS:
                ran.take_turn(200)
        finally:
            ran.end()  # the export and its checks are not measured
    ends = [turn.record["seconds"] for turn in ran.turns if turn.record["step"] >= WARM_UP]
    return sorted(after - before for before, after in pairwise(ends))[FASTEST]


def predicted(case: Case, machine: Machine, folder: Path) -> Plan:
    """Return the plan of a case on the machine's CPU ranks."""
    recipe = recipe_of(case, folder)
    if recipe.draft.enabled:
        from deepspeed_recipes.benchmarks.measure import config_of  # imports torch

        model = replace(recipe.model, config=config_of(recipe, recipe.draft).to_dict())
        recipe = replace(recipe, model=model, draft=Draft())
    documents = CHAT_LENGTH if recipe.packing else recipe.sequence_length
    recipe = replace(recipe, deepspeed=Path(recipe.deepspeed).name)
    request = strategies.plan_request(recipe, of_cpus(machine, case.ranks), document_length=documents)
    return strategies.evaluate(request, recipe)


def comparisons(machine: Machine, runs: Mapping[str, Sequence[float]]) -> list[Comparison]:
    """Return the cases with runs, each with its prediction and the median of its runs."""
    with tempfile.TemporaryDirectory() as scratch:
        plans = {case: predicted(case, machine, Path(scratch)) for case in CASES if runs.get(case.label)}
    return [
        Comparison(
            case,
            plan.setup.tokens_per_step / plan.speed / plan.setup.world_size,
            statistics.median(runs[case.label]),
            (plan.speed_range[0] / plan.speed, plan.speed_range[1] / plan.speed),
            CASES.index(case) % 2 == 1,
        )
        for case, plan in plans.items()
    ]


def prediction_range(found: Sequence[Comparison]) -> tuple[float, float]:
    """Return the 95 % prediction interval of measured / predicted speed, from the cases that do not judge."""
    logs = [math.log(one.ratio) for one in found if not one.judges]
    middle, width = statistics.mean(logs), STUDENT * statistics.stdev(logs) * math.sqrt(1 + 1 / len(logs))
    return math.exp(middle - width), math.exp(middle + width)


def table(found: Sequence[Comparison]) -> str:
    """Return the comparisons as a Markdown table, and under it the errors of the cases that judge and of the others."""
    lines = ["| case | judges | predicted s | measured s | ratio | inside |", "|---|---|---|---|---|---|"]
    for one in found:
        seconds = f"{one.predicted:.3f} | {one.measured:.3f} | {one.ratio:.2f}"
        lines.append(f"| {one.case.label} | {'yes' * one.judges} | {seconds} | {'yes' if one.inside else 'no'} |")
    return "\n".join(lines) + "\n\n" + "".join(f"{sentence(found, judges)}\n" for judges in (True, False))


def sentence(found: Sequence[Comparison], judges: bool) -> str:
    """Return the errors of the cases that judge, or of those that the terms were found with."""
    part = [one for one in found if one.judges == judges]
    errors = [abs(one.ratio - 1) for one in part]
    return (
        f"- {len(part)} cases {'that judge' if judges else 'that terms were found with'}: "
        f"{statistics.median(errors):.0%} off in the median, {max(errors):.0%} at most, "
        f"{statistics.mean(one.inside for one in part):.0%} inside the range."
    )


@cache
def stored(file: Path = MACHINE) -> tuple[Machine, JsonView, list[Comparison]]:
    """Return the stored measurements of a machine, of the cases on it, and their comparisons."""
    machine, result = machine_file.read(file), read_json(result_of(file))
    return machine, result, comparisons(machine, result["runs"])


def errors() -> str:
    """Return the errors of the stored results for the documents."""
    return "\n".join(
        f"{where}:\n\n" + "".join(f"{sentence(stored(file)[2], judges)}\n" for judges in (True, False))
        for where, file in MACHINES.items()
    )


def section() -> str:
    """Return the stored results for the documents."""
    parts = []
    for where, file in MACHINES.items():
        machine, result, found = stored(file)
        runs = min(map(len, result["runs"].values()))
        how = f"medians of {runs} runs or more" if runs > 1 else "one run each"
        parts.append(
            f"{where}: seconds of a step of CPU ranks, {machine.cores} cores of {result['cpu']}, one thread per rank, "
            f"{result['date']}, {how}:\n\n{table(found)}"
        )
    return "\n".join(parts)


def main() -> None:
    """Measure for about the given time, the cases with the fewest runs first, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "machine",
        nargs="?",
        type=Path,
        default=MACHINE,
        help="from doctor --measure, shortly before: machine_NAME.json",
    )
    parser.add_argument("--seconds", type=float, default=150, help="0 only prints")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    machine, file = machine_file.read(arguments.machine), result_of(arguments.machine)
    runs = read_json(file)["runs"] if file.exists() else {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        while time.monotonic() - began < arguments.seconds:
            case = min(cases_of(machine), key=lambda one: len(runs.get(one.label, [])))
            if len(runs.get(case.label, [])) >= arguments.runs:
                break
            runs.setdefault(case.label, []).append(measured(case, Path(scratch) / f"{time.monotonic():.0f}"))
            write_json(file, {"date": date.today().isoformat(), "cpu": processor(), "runs": runs})
    print(table(comparisons(machine, runs)))


def processor() -> str:
    """Return the processor's name."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "an unknown CPU")


if __name__ == "__main__":
    main()
