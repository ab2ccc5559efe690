"""What the launcher asks the planner: the cost of a run before it starts, a way that fits, and how right it was."""

from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from recipes.planning import report, ways_out
from recipes.planning.hardware import Cluster, this_machine
from recipes.planning.plans import Plan
from recipes.planning.strategies import cost, job, search
from recipes.spec.errors import UserError
from recipes.spec.pages import ROOT
from recipes.spec.recipe import Layout, Recipe
from recipes.spec.run_folder import RunFolder, read_json, write_json

AUTO = "auto"
"""As `deepspeed`: the planner chooses file, layout, micro-batch and checkpointing."""


def machines(gpus: int, nodes: int = 1) -> Cluster | None:
    """Return so many machines like this one, with so many GPUs each; None where it has none."""
    here = this_machine()
    return here and replace(here, gpus_per_node=gpus, nodes=nodes)


def choose(recipe: Recipe, given: Iterable[str], cluster: Cluster) -> Recipe:
    """Return the recipe as the best plan has it.

    Args:
        recipe: with its model's dimensions.
        given: the keys that the user has set, which stay as they are.
        cluster: where it is to run.

    Raises:
        UserError: nothing fits; with what would.
    """
    fixed = frozenset(given) - {"deepspeed"}
    kept = {name: size for name, size in asdict(recipe.layout).items() if f"layout.{name}" in fixed}
    asked = job(replace(recipe, layout=Layout(**kept)), cluster, fixed)
    found = search(asked)
    if found.best is None:
        raise UserError(f"deepspeed={AUTO}: {ways_out.sentence(asked, found)}")
    return found.best.recipe


def forecast(recipe: Recipe, cluster: Cluster) -> Plan | None:
    """Return what a run will cost; None for a draft, and for a model whose dimensions nobody has said.

    Args:
        recipe: with its model's dimensions.
        cluster: where it runs.

    Raises:
        UserError: it does not fit; with the nearest way that does.
    """
    if recipe.draft.enabled or not recipe.model.config:
        return None
    path = Path(recipe.deepspeed)
    recipe = replace(recipe, deepspeed=path.name if path.parent == ROOT / "configs" else recipe.deepspeed)
    try:
        asked = job(recipe, cluster)
    except UserError:  # code of the model's own, for instance: what cannot be planned may still run
        return None
    plan = cost(asked, recipe)
    if plan.fits:
        return plan
    found = search(asked)
    if found.best:
        way = f"What fits: {' '.join(report.changes(recipe, found.best.recipe))}"
    else:
        way = ways_out.sentence(asked, found).rstrip(".")
    raise UserError(f"this run needs {' and '.join(plan.short)}.\n{way}; or try it all the same: --no-plan")


def line(plan: Plan) -> str:
    """Return the forecast as one line."""
    tight = ", which is tight" if plan.tight else ""
    return (
        f"forecast: {plan.gpu_gib:.1f} GiB per GPU ({plan.share:.0%}{tight}), "
        f"{plan.speed * plan.setup.world_size:,.0f} tokens/s"
    )


def compare(run: RunFolder, plan: Plan | None) -> None:
    """Add what was predicted and what happened to the summary of a run that has ended; None where nobody knows."""
    if not run.summary.exists():
        return
    summary: dict[str, Any] = read_json(run.summary)
    if summary.get("stopped"):
        return
    # Of a GPU, PyTorch measures what it allocates and reserves itself, apart from CUDA's context and NCCL's buffers.
    measured = {
        "gpu_allocated_gib": summary.get("gpu_peak_gib"),
        "gpu_reserved_gib": summary.get("gpu_reserved_gib"),
        "tokens_per_second": summary["tokens_per_second"],
    }
    predicted = _predicted(plan) if plan else dict.fromkeys(measured)
    write_json(run.summary, summary | {"predicted": predicted, "measured": measured})


def _predicted(plan: Plan) -> dict[str, float]:
    reserved = plan.gpu_gib - plan.parts["runtime"]
    return {
        "gpu_allocated_gib": reserved - plan.parts["fragmentation"],
        "gpu_reserved_gib": reserved,
        "tokens_per_second": plan.speed * plan.setup.world_size,
    }
