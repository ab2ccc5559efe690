"""The planner's answers to the launcher: a run's forecast, settings that fit, and the prediction's error afterwards."""

import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

from ...recipe import overrides
from ...recipe.errors import UserError
from ...recipe.files import Json
from ...recipe.project import CONFIGS
from ...recipe.recipe import Layout, Recipe
from ...recipe.run_folder import RunFolder, is_finished, read_json, read_jsonl, write_json
from ..hardware import machine_file
from ..hardware.cluster import Cluster, of_cpus, this_machine, with_measurements
from ..hardware.machine_file import Machine
from . import plans, suggestions
from .plans import Plan
from .strategies import evaluate, plan_request, search

AUTO = "auto"
"""The value of `deepspeed` with which the planner chooses file, layout, micro-batch size and checkpointing."""


def machines(gpus: int, nodes: int = 1) -> Cluster | None:
    """Return a cluster of machines like this one with `gpus` GPUs each, or None if this machine has no GPU."""
    here = this_machine()
    if here is None:
        return None
    return plans.corrected(with_measurements(replace(here, gpus_per_node=gpus, nodes=nodes), None, elsewhere=False))


def cpus_here() -> Machine | None:
    """Return the measurements of this machine's CPU, or None; print why a file is not used."""
    try:
        file = machine_file.default_file()
        machine = machine_file.read(file) if file.exists() else None
    except UserError as error:
        print(f"{error} It is not used.", file=sys.stderr, flush=True)
        return None
    return machine if machine and machine.device == machine_file.CPU else None


def cpu_ranks(ranks: int) -> Cluster | None:
    """Return CPU ranks of this machine, or None if its CPU was not measured."""
    machine = cpus_here()
    return plans.corrected(of_cpus(machine, ranks)) if machine else None


def choose(recipe: Recipe, given: Iterable[str], cluster: Cluster, document_length: float | None = None) -> Recipe:
    """Return the recipe with the settings of the best plan, or of a tight plan if none fits (`line` warns about that).

    The values of the keys that the user has `given` are kept.
    """
    fixed = frozenset(given) - {"deepspeed"}
    sizes = {name: size for name, size in asdict(recipe.layout).items() if f"layout.{name}" in fixed}
    result = search(plan_request(replace(recipe, layout=Layout(**sizes)), cluster, fixed, document_length))
    for plan in (*result.plans, *result.tight):
        return plan.recipe
    raise UserError(f"deepspeed={AUTO}: {suggestions.sentence(result)}")


def forecast(recipe: Recipe, cluster: Cluster, document_length: float | None = None) -> Plan | None:
    """Return the predicted cost of a run; None for a draft, unknown dimensions, and bf16 on a CPU without it."""
    emulated = recipe.precision == "bf16" and cluster.on_cpus and not cluster.gpu.bf16
    if recipe.draft.enabled or not recipe.model.config or emulated:
        return None
    path = Path(recipe.deepspeed)
    recipe = replace(recipe, deepspeed=path.name if path.parent == CONFIGS else recipe.deepspeed)
    try:
        request = plan_request(recipe, cluster, document_length=document_length)
    except UserError:  # a model that cannot be planned, such as one with its own code, may still run
        return None
    plan = evaluate(request, recipe)
    if not plan.shortfalls or cluster.on_cpus:  # their memory is counted as on GPUs
        return plan
    result = search(request)
    if result.best:
        hint = f"What fits: {' '.join(overrides.differences(recipe, result.best.recipe))}"
    else:
        hint = suggestions.sentence(result).rstrip(".")
    raise UserError(f"this run needs {' and '.join(plan.shortfalls)}.\n{hint}; or start it anyway: --no-plan")


def line(plan: Plan) -> str:
    """Return the forecast as one line."""
    tight = f", which is tight: up to {plan.gpu_gib_range[1]:.1f}" if plan.tight else ""
    return (
        f"forecast: {plan.gpu_gib:.1f} GiB per {'rank' if plan.cluster.on_cpus else 'GPU'} ({plan.share:.0%}{tight}), "
        f"{plan.speed * plan.setup.world_size:,.0f} tokens/s"
    )


def compare(run: RunFolder, plan: Plan | None) -> None:
    """Add the predicted values, if there was a plan, and the measured ones to the summary of a finished run."""
    if not is_finished(run):
        return
    summary: Json = read_json(run.summary)
    # On a GPU, PyTorch measures what it allocates and reserves itself, without CUDA's context and NCCL's buffers.
    measured = {
        "gpu_allocated_gib": summary.get("gpu_peak_gib"),
        "gpu_reserved_gib": summary.get("gpu_reserved_gib"),
        "tokens_per_second": summary["tokens_per_second"],
    }
    predicted: Json = dict.fromkeys(measured)
    if plan:
        parts = {} if plan.cluster.on_cpus else dict(plan.components)
        reserved = sum(parts.values()) - parts["runtime"] if parts else None
        predicted = {
            "gpu_allocated_gib": None if reserved is None else reserved - parts["fragmentation"],
            "gpu_reserved_gib": reserved,
            "tokens_per_second": plan.speed * plan.setup.world_size,
            "uncorrected_tokens_per_second": plan.time.tokens_per_second_per_gpu * plan.setup.world_size,
            "kind": plans.kind_of(plan.setup),
            "rates": plans.rates_of(plan.cluster),
            "components_gib": parts,
        }
        speeds = [row["tokens_per_second"] for row in read_jsonl(run.metrics) if row.get("tokens_per_second")]
        if len(speeds) > 1:  # the first logged step compiles kernels and fills caches
            measured["steady_tokens_per_second"] = machine_file.median_of(speeds[1:])
    write_json(run.summary, summary | {"predicted": predicted, "measured": measured})
