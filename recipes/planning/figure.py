"""A picture of memory: one bar per plan, cut into what it consists of."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from recipes.planning.plans import REFUSE, Plan
from recipes.planning.report import written


def png(plans: Mapping[str, Plan]) -> bytes:
    """Return the picture of plans for one kind of GPU, by what is written beside each bar."""
    written = io.BytesIO()
    draw(plans).savefig(written, format="png", dpi=120)
    return written.getvalue()


def draw(plans: Mapping[str, Plan]) -> Figure:
    """Return the figure of it."""
    figure = Figure(figsize=(9, 1.2 + 0.45 * len(plans)), layout="constrained")
    axes: Any = figure.subplots()
    names = list(plans)[::-1]
    parts = list(dict.fromkeys(part for plan in plans.values() for part in plan.parts))
    left = [0.0] * len(names)
    for part in parts:
        sizes = [plans[name].parts.get(part, 0) for name in names]
        axes.barh(names, sizes, left=left, label=part.replace("_", " "))
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    memory_gib = next(iter(plans.values())).cluster.gpu.memory_gib
    axes.axvline(memory_gib, color="black", linewidth=1)
    axes.axvline(REFUSE * memory_gib, color="black", linewidth=1, linestyle=":")
    axes.set_xlabel("GiB on the fullest GPU (line: what it has; dots: where a plan is refused)")
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    return figure


def labels(plans: Sequence[Plan]) -> dict[str, Plan]:
    """Return plans by number, file and layout."""
    return {
        f"{number}. {plan.recipe.deepspeed.removesuffix('.json')}, {written(plan.recipe.layout, plan.setup.rows)}, "
        f"{plan.setup.micro_batch_size} rows": plan
        for number, plan in enumerate(plans, start=1)
    }
