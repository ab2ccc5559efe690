"""Shows hardware choices as a table and as data."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from ..hardware.cluster import Cluster
from ..search.run_cost import Workload
from ..search.which_gpu import Choice
from .table import cost, hardware_in_words, layout_in_words

SHOWN = 8
"""Number of choices in the table."""


def rows(choices: Sequence[Choice], least: Choice | None) -> list[Choice]:
    """Return the choices to show: the cheapest, and the smallest if it is not among them."""
    shown = list(choices[:SHOWN])
    return shown if least is None or any(one.cluster == least.cluster for one in shown) else [*shown, least]


def table(shown: Sequence[Choice], least: Choice | None, workload: Workload) -> Table:
    """Return the choices as a table, the cheapest first."""
    result = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "hardware", "config", "layout", "GPU full", "host GiB", "tokens/s", "$/hour", "hours", "dollars"):
        left = name in ("", "hardware", "config", "layout")
        result.add_column(name, justify="left" if left else "right", no_wrap=True)
    for choice in shown:
        plan, cluster = choice.plan, choice.cluster
        hourly = workload.prices.per_hour(cluster)
        result.add_row(
            ", ".join(names(choice, shown, least)),
            _in_words(cluster),
            plan.recipe.deepspeed.removesuffix(".json"),
            layout_in_words(plan.recipe.layout, plan.setup.data_parallel_size),
            f"{plan.share:.0%}",
            f"{plan.host_gib:,.0f}",
            f"{plan.speed * plan.setup.world_size:,.0f}",
            "-" if hourly is None else f"{hourly:,.2f}",
            *cost(plan, workload),
        )
    return result


def _in_words(cluster: Cluster) -> str:
    if not cluster.instance:
        return hardware_in_words(cluster)
    return f"{cluster.nodes} x {cluster.instance} ({cluster.gpus_per_node} x {cluster.gpu.name})"


def names(choice: Choice, shown: Sequence[Choice], least: Choice | None) -> list[str]:
    """Return the labels of a choice: `cheapest`, `smallest`, both or none."""
    priced = [one for one in shown if one.dollars is not None]
    cheapest = ["cheapest"] if priced and choice is priced[0] else []
    return [*cheapest, *(["smallest"] if least and choice.cluster == least.cluster else [])]


def as_json(shown: Sequence[Choice], least: Choice | None, workload: Workload) -> list[dict[str, Any]]:
    """Return the choices as data."""
    return [
        {
            "is": names(choice, shown, least),
            "instance": choice.cluster.instance or None,
            "gpu": choice.cluster.gpu.name,
            "gpus_per_node": choice.cluster.gpus_per_node,
            "nodes": choice.cluster.nodes,
            "config": choice.plan.recipe.deepspeed,
            "gpu_peak_gib": choice.plan.gpu_gib,
            "host_gib": choice.plan.host_gib,
            "dollars_per_hour": workload.prices.per_hour(choice.cluster),
            "hours": choice.hours,
            "dollars": choice.dollars,
        }
        for choice in shown
    ]
