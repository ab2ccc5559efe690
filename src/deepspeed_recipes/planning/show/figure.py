"""Draws the memory of plans: one bar per plan, divided into its components."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from .. import TABLES
from ..search.plans import Plan
from .table import layout_in_words

COLOURS: dict[str, str] = TABLES["colours"]
"""The colour of each component, the same in every figure."""


def png(plans: Mapping[str, Plan]) -> bytes:
    """Return the figure as PNG. The keys label the bars; all plans are for the same kind of GPU."""
    image = io.BytesIO()
    figure = Figure(figsize=(9, 1.2 + 0.45 * len(plans)), layout="constrained")
    axes: Any = figure.subplots()
    labels = list(plans)[::-1]
    components = [name for name in COLOURS if any(name in plan.components for plan in plans.values())]
    left = [0.0] * len(labels)
    for name in components:
        sizes = [plans[label].components.get(name, 0) for label in labels]
        axes.barh(labels, sizes, left=left, color=COLOURS[name], label=name.replace("_", " "))
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    memory_gib = next(iter(plans.values())).cluster.gpu.memory_gib
    axes.axvline(memory_gib, color="black", linewidth=1)
    axes.set_xlabel("GiB on the fullest GPU (line: its memory)")
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(image, format="png", dpi=120)
    return image.getvalue()


def labels(plans: Sequence[Plan]) -> dict[str, Plan]:
    """Return plans under labels with their number, file, layout and micro-batch size."""
    return {
        f"{number}. {plan.recipe.deepspeed.removesuffix('.json')}, "
        f"{layout_in_words(plan.recipe.layout, plan.setup.data_parallel_size)}, "
        f"micro-batch {plan.setup.micro_batch_size}": plan
        for number, plan in enumerate(plans, start=1)
    }
