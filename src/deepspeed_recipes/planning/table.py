"""Shows a search result as data, as a table, as a bar of memory, and as the command that starts the best plan."""

import math
import shlex
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import repeat

from rich.console import Console
from rich.table import Table

from ..recipe import overrides, pages, project
from ..recipe.errors import counted
from ..recipe.files import Json
from ..recipe.methods.grpo import Grpo
from ..recipe.recipe import Layout, Recipe
from .cost.constants import COUNTS, constants
from .hardware.cluster import Cluster
from .hardware.gpus import DESKTOP_HOST
from .hardware.instances import INSTANCES
from .model_profile.profile import ModelProfile
from .search.model_recipe import method_of
from .search.plans import GIB, Plan, PlanRequest, SearchResult, Workload, in_words, kind_of
from .search.reasons import behind, why

SHOWN = 8
"""Number of plans in the table."""
BAR = 40
"""Width in characters of a bar that stands for a GPU's whole memory."""
HOSTS = "HOSTS"
"""Placeholder for the hostfile in a command."""
UNEVEN = 0.1
"""Standard deviation of a machine's own speed above which it is named."""


def as_json(result: SearchResult, workload: Workload | None = None) -> Json:
    """Return the result as `ds-recipes plan --json` prints it: plans that fit, tight plans, then rejected plans.

    With a workload, each plan has `hours` and `dollars`; `dollars` is None if the price of the hardware is unknown.
    """
    request, plans = result.request, [*result.plans, *result.tight, *result.rejected]
    cluster, recipe = request.cluster, request.recipe
    return {
        "model": {
            "recipe": pages.typed(recipe),
            "path": recipe.model.path,
            "model_type": request.profile.model_type,
            "parameters": request.profile.parameters,
            "method": recipe.variant or method_of(recipe),
            "sequence_length": recipe.sequence_length,
            "global_batch_size": (plans[0].recipe if plans else recipe).global_batch_size,
        },
        "hardware": {
            "gpu": cluster.gpu.name,
            "instance": cluster.instance or None,
            "gpu_memory_gib": cluster.gpu.memory_gib,
            "gpus_per_node": cluster.gpus_per_node,
            "nodes": cluster.nodes,
            "host_memory_gib": cluster.host_memory_gib or None,
            "nvme_gib": cluster.nvme_gib or None,
            "network_gbs": cluster.node_network_gbs if cluster.nodes > 1 else None,
            "calibrated": bool(plans) and plans[0].time.measured,
            "measured": {"file": str(machine.file), "date": machine.date} if (machine := cluster.machine) else None,
        },
        "plans": [
            {
                **({"hours": workload.hours(plan), "dollars": workload.dollars(plan)} if workload else {}),
                "config": plan.recipe.deepspeed,
                "layout": {"data": plan.setup.data_parallel_size, **asdict(plan.recipe.layout)},
                "micro_batch_size": plan.setup.micro_batch_size,
                "gradient_accumulation_steps": plan.setup.gradient_accumulation_steps,
                "gradient_checkpointing": plan.setup.gradient_checkpointing,
                "gpu_peak_gib": plan.gpu_gib,
                "gpu_peak_gib_range": list(plan.gpu_gib_range),
                "gpu_breakdown_gib": dict(plan.components),
                "host_gib": plan.memory.host_gib,
                "nvme_gib": plan.memory.nvme_gib,
                "checkpoint_gib": plan.memory.checkpoint_gib,
                "tokens_per_second_per_gpu": plan.speed,
                "tokens_per_second_per_gpu_range": list(plan.speed_range),
                "step_seconds": plan.seconds,
                "corrected_by": {"runs": plan.correction.runs, "factor": plan.correction.factor},
                "fits": plan.fits,
                "tight": plan.tight,
                "why": why(request, plan),
                "command": command(plan.recipe, cluster),
            }
            for plan in plans
        ],
        "best": 0 if result.best else None,
    }


def command(recipe: Recipe, cluster: Cluster) -> str:
    """Return the command that starts a recipe on a cluster; `HOSTS` stands for the hostfile of several nodes."""
    page = pages.find(pages.typed(recipe), recipe.variant)
    where = ["--hostfile", HOSTS, "--nodes", str(cluster.nodes)] if cluster.nodes > 1 else []
    words = [pages.typed(recipe), recipe.variant, *where, "--gpus", str(cluster.gpus_per_node)]
    return f"{project.command('launch')} {shlex.join([*words, *overrides.differences(page, recipe)])}"


def show(
    result: SearchResult,
    console: Console,
    explain: bool,
    workload: Workload | None = None,
    remarks: Iterable[str] = (),
) -> None:
    """Print the table, then the best plan's memory as a bar, its reasons, notes and command."""
    request, possible = result.request, [*result.plans, *result.tight]
    plans = [*(possible if explain else shown(possible)), *(result.rejected if explain or not possible else ())]
    planned = replace(request, recipe=plans[0].recipe) if plans else request
    console.print(f"{asked(planned)}, on {hardware_in_words(request.cluster)}")
    console.print(_table(plans, [] if explain else possible, workload))
    if (best := result.best) is None:
        for number, plan in enumerate(plans if explain else (), start=1):
            console.print(f"\n{number}. {why(request, plan)}")
        return
    for line in bar(best):
        console.print(line)
    for number, plan in enumerate(plans if explain else plans[:1], start=1):
        rank = f" Compared with the first: {behind(plan, plans[0])}." if number > 1 and not plan.shortfalls else ""
        console.print(f"\n{f'{number}. ' if explain else ''}{why(request, plan)}{rank}")
    for note in (*faster(plans), *notes(request, best), *(cost_notes(best, workload) if workload else ()), *remarks):
        console.print(f"\n{note}")
    console.print(f"\n{command(best.recipe, request.cluster)}", soft_wrap=True)


def faster(plans: Sequence[Plan]) -> Iterator[str]:
    """Yield a note if a plan that ranks lower, because it offloads or is less simple, is predicted to be faster."""
    times, at, plan = max((one.speed / plans[0].speed, at, one) for at, one in enumerate(plans, start=1) if one.fits)
    why = "The simpler one comes first where speeds are not certain enough to decide"
    if plan.tier > plans[0].tier:
        why = "Plans that offload come last, since hosts' memory and links differ most from machine to machine"
    if times * COUNTS.fast_enough > 1:
        yield f"Plan {at} is predicted to be {times:.2g} times as fast. {why}: try both."


def shown(plans: Sequence[Plan]) -> list[Plan]:
    """Return the first plans, and the best plan of each tier that is not among them; of plans that are alike, one."""
    plans = [plan for at, plan in enumerate(plans) if not any(plan.is_like(before) for before in plans[:at])]
    first = list(plans[:SHOWN])
    for plan in plans[SHOWN:]:
        if plan.tier not in {one.tier for one in first}:
            first.append(plan)
    return first


def notes(request: PlanRequest, plan: Plan) -> Iterator[str]:
    """Yield notes on a plan: its range, assumptions and side effects."""
    recipe, cluster = plan.recipe, plan.cluster
    batch, before, gpu = recipe.global_batch_size, request.recipe.global_batch_size, plan.cluster.gpu.name
    low, high = plan.gpu_gib_range
    yield f"Memory, by published runs of its kind: {low:,.0f} to {high:,.0f} GiB."
    if plan.correction.runs:
        yield (
            f"Speeds of its kind ({kind_of(plan.setup)}) are corrected by {plan.correction.runs} finished runs here: "
            f"x {plan.correction.factor:.2f}; without them {plan.time.tokens_per_second_per_gpu:,.0f} tokens/s/GPU."
        )
    elif not cluster.machine:
        yield (
            "Range of speeds: published runs on machines that were not measured. ds-recipes doctor --measure on such a "
            "machine narrows it."
        )
    if plan.setup.offload_optimizer != "none" and cluster.host_memory_gib == DESKTOP_HOST:
        yield f"{DESKTOP_HOST:.0f} GiB of host memory are assumed, as in a desktop; --host-memory sets another size."
    if plan.setup.offload_optimizer != "none" and not cluster.host_memory_gib:
        need = f"{plan.memory.host_gib:,.0f} GiB of host memory per node"
        yield f"This plan needs {need}, which was not checked: give --host-memory."
    if batch != before:
        yield f"global_batch_size was raised from {before} to {batch}, so that every GPU gets equally many sequences."
    if isinstance(recipe.method, Grpo):
        yield _rollouts(plan, recipe.method, request.profile)
    elif recipe.method.writes_answers:
        yield "Speeds are for training only; writing the answers before each step takes additional time."
    if not pages.is_own_model(recipe):
        yield f"Data, rates and batch are from {pages.typed(recipe)}, the nearest recipe: check them."
    if (each := plan.memory.checkpoint_gib) > COUNTS.large_checkpoint:
        yield f"Each checkpoint takes {each:,.0f} GiB on disk; keep_checkpoints={recipe.keep_checkpoints} are kept."
    if not cluster.on_cpus and (waits := plan.time.components["launch"] / plan.time.seconds) > COUNTS.waits:
        yield (
            f"The GPU waits for Python during {waits:.0%} of a step: a slow CPU can double the time, and more tokens "
            "per pass (micro_batch_size, packing) cost little."
        )
    if machine := cluster.machine:
        others = "each GPU here is a CPU rank" if cluster.on_cpus else "the other rates are from datasheets"
        yield f"Speeds use rates measured on {machine.date} ({machine.file}); {others}."
        if machine.spread > UNEVEN:
            yield f"Its speed varied by {machine.spread:.0%} while it was measured, so the range of speeds is wider."
    elif not plan.time.measured:
        yield f"No measurements on {gpu} were used: the order of the plans is more reliable than their speeds."
    if recipe.precision == "fp16" and not cluster.gpu.bf16:
        yield f"{gpu} has no bf16, so training is in fp16; its first steps search for a loss scale."
    if cluster.on_cpus and recipe.precision != request.recipe.precision:
        yield "This CPU has no instructions for bf16, so training is in fp32."


def _rollouts(plan: Plan, method: Grpo, profile: ModelProfile) -> str:
    """Return the time of writing a step's answers, on the ranks or by a server, and the server's memory."""
    gpu, answers = plan.cluster.gpu, plan.recipe.global_batch_size
    token = 2 * profile.parameters / (gpu.memory_gbs * 1e9)  # every token reads all weights
    where = "on a server with one such GPU"
    if method.vllm is None:
        answers = plan.setup.rollout_answers
        where = f"{answers} at a time on each GPU"
        token = max(token, len(profile.layers) * COUNTS.kernels * constants(gpu.name).launch)
    kept = 2 * sum(map(profile.cached_per_token, profile.layers))
    seconds = method.max_new_tokens * (token + answers * kept * plan.recipe.sequence_length / (gpu.memory_gbs * 1e9))
    written = (
        f"Speeds are for training only, {plan.seconds:,.0f} s per step. Writing the "
        f"answers takes at least {seconds:,.0f} s more, {where}."
    )
    if method.vllm is None:
        return written
    need = (2 * profile.parameters + answers * kept * plan.recipe.sequence_length) / GIB
    return f"{written} The server needs {need:,.0f} GiB of its GPU for weights and all answers; vLLM takes 90 % of it."


def cost_notes(plan: Plan, workload: Workload) -> Iterator[str]:
    """Yield notes on what hours and dollars include."""
    recipe, cluster, hours = plan.recipe, plan.cluster, workload.hours(plan)
    fast, slow = (hours * plan.speed / speed for speed in reversed(plan.speed_range))
    if in_words(fast) != in_words(slow):
        yield f"By the range of speeds it takes {in_words(fast)} to {in_words(slow)}."
    about, how = ("about ", f" ({workload.about})") if workload.about else ("", "")
    left_out = f"loading{', writing answers' * isinstance(recipe.method, Grpo)}{', padding' * (not recipe.packs)}"
    full = "" if recipe.packs or workload.examples else " if all sequences are full"
    yield (
        f"Hours are for training {about}{workload.tokens:,.0f} tokens{how}, in "
        f"{counted(workload.steps(plan), 'step')}{full}; {left_out} and checkpoints are not included."
    )
    if hours < COUNTS.short_run:
        loading = COUNTS.start + plan.memory.checkpoint_gib / COUNTS.drive / 60
        yield f"Starting and loading add about {loading:,.0f} min to the {in_words(hours)} of training."
    hourly = workload.per_hour(cluster)
    if hourly is None:
        same = [name for name in workload.prices.known() if INSTANCES[name].gpu == cluster.gpu.name]
        enough = [name for name in same if INSTANCES[name].gpus >= cluster.gpus_per_node]
        cheapest = min(enough, key=lambda name: workload.prices.of_node(name) or math.inf, default="")
        other = f"; the cheapest known node with enough of them is --gpu {cheapest}" if cheapest else ""
        what = cluster.instance or cluster.gpu.name
        yield f"The price of {what} is unknown: give --price, in dollars per hour of a node{other}."
        return
    where = "the node" if cluster.nodes == 1 else f"{cluster.nodes} nodes"
    each = "" if cluster.gpus == 1 else f", {hourly / cluster.gpus:,.2f} per GPU"
    yield f"Dollars: {hourly:,.2f} per hour of {where}{each}, {workload.prices.source(cluster.instance)}."
    idle = INSTANCES[cluster.instance].gpus - cluster.gpus_per_node if cluster.instance else 0
    if idle > 0:
        yield f"{cluster.instance} has {counted(idle, 'more GPU')}, idle but paid for."


def asked(request: PlanRequest) -> str:
    """Return the request without the hardware: model, method, batch and sequence length."""
    recipe, parameters = request.recipe, pages.human(request.profile.parameters)
    name = f"{recipe.model.path} ({parameters})"
    if pages.is_own_model(recipe):
        name = f"{pages.typed(recipe)} ({recipe.model.path}, {parameters})"
    what = "sequences of" if recipe.method.sequences == 1 else f"examples of {recipe.method.sequences} x"
    step = f"{recipe.global_batch_size} {what} {recipe.sequence_length:,} tokens per step"
    return f"{name}, {recipe.variant}, {step}"


def hardware_in_words(cluster: Cluster) -> str:
    """Return the description of a cluster: `4 x 8 x H100 (79.1 GiB), 3,200 Gbit/s per node`."""
    gpu = cluster.gpu
    about = f"assumed to be as fast as {gpu.like}" if gpu.like else f"{gpu.memory_gib:g} GiB"
    node = f"{cluster.gpus_per_node} x {gpu.name} ({about})"
    if cluster.nodes == 1:
        return node
    return f"{cluster.nodes} x {node}, {8 * cluster.node_network_gbs:,.0f} Gbit/s per node"


def columns(
    rows: Sequence[Mapping[str, str]], left: Container[str], styles: Iterable[str | None] = repeat(None)
) -> Table:
    """Return rows of cells by the name of their column as a table; those of the names in `left` are aligned there."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in rows[0] if rows else ():
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for row, style in zip(rows, styles, strict=False):
        table.add_row(*row.values(), style=style)
    return table


def _table(plans: Sequence[Plan], possible: Sequence[Plan], workload: Workload | None) -> Table:
    drives = any(plan.memory.nvme_gib for plan in plans)
    rows = []
    for number, plan in enumerate(plans, start=1):
        alike, speed = [one for one in possible if one.is_like(plan)], f"{plan.speed:,.0f}"
        fits, how, (low, high) = not plan.shortfalls, plan.setup.gradient_checkpointing, plan.speed_range
        speeds = f"{low:,.0f} to {high:,.0f}" if low < 1000 else f"{low / 1000:,.1f} to {high / 1000:,.1f}k"
        row = {
            "": str(number),
            "config": ", ".join(dict.fromkeys(one.base.deepspeed.removesuffix(".json") for one in (plan, *alike))),
            "layout": layout_in_words(plan.recipe.layout, plan.setup.data_parallel_size),
            "micro-batch": f"{plan.setup.micro_batch_size} x {plan.setup.gradient_accumulation_steps}",
            "checkpointing": how if isinstance(how, str) else "yes" if how else "no",
            "GPU GiB": f"{plan.gpu_gib:.1f}",
            " ": f"{plan.share:.0%}",
            "host GiB": _size(plan.memory.host_gib),
            **({"NVMe GiB": _size(plan.memory.nvme_gib)} if drives else {}),
            "tokens/s/GPU": f"{'tight: ' if plan.tight else ''}{speed}" if fits else "does not fit",
            "range": speeds if fits else "",
            "s/step": f"{plan.seconds:{',.0f' if plan.seconds >= 100 else '.3g'}}" if fits else "",
        }
        if workload:
            row["hours"], row["dollars"] = cost(plan, workload) if fits else ("", "")
        rows.append(row)
    styles = (None if plan.fits else "yellow" if plan.tight else "red" for plan in plans)
    return columns(rows, ("config", "layout"), styles)


def cost(plan: Plan, workload: Workload) -> tuple[str, str]:
    """Return the table cells for a plan's hours, in smaller units where they are few, and dollars."""
    hours, dollars = workload.hours(plan), workload.dollars(plan)
    return (
        f"{hours:,.1f}" if hours >= 1 else f"{hours:.2f}" if hours >= 0.1 else in_words(hours),
        "-" if dollars is None else f"{max(dollars, 0.01):,.2f}" if dollars < 100 else f"{dollars:,.0f}",
    )


def _size(size: float) -> str:
    return f"{size:,.0f}" if size >= 0.5 else "-"


def layout_in_words(layout: Layout, data_parallel_size: int) -> str:
    """Return the description of a layout: `data 4 x tensor 8`."""
    sizes = {"data": data_parallel_size, **asdict(layout)}
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one GPU"


def bar(plan: Plan) -> Iterator[str]:
    """Yield a plan's memory on a GPU as a bar, with a line for each component and for the free memory."""
    have, before = plan.cluster.gpu.memory_gib, 0.0
    components = sorted(plan.components.items(), key=lambda item: -item[1])
    yield ""
    for name, size in (*components, ("free", have - plan.gpu_gib)):
        start, stop = round(BAR * before / have), round(BAR * (before + size) / have)
        line = " " * start + ("." if name == "free" else "#") * (stop - start)
        yield f"{name.replace('_', ' '):<18}{size:>8.1f} GiB  |{line:<{BAR}}|"
        before += size
