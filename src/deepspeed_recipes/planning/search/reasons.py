"""Explains a plan in one sentence, each part with the number that decided it."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from ...recipe.layout import bubble
from ...recipe.recipe import Layout
from .. import TABLES
from ..cost.constants import COUNTS, memory_range
from ..cost.memory import peak_memory
from ..cost.step_time import COMPONENTS
from ..cost.training_setup import TrainingSetup
from .plans import GIB, Plan, PlanRequest


def behind(plan: Plan, first: Plan) -> str:
    """Return which components make a plan slower per token than the first, or why it ranks lower despite its speed."""
    longer = first.speed / plan.speed - 1
    if longer < COUNTS.alike:
        faster = plan.speed / first.speed - 1
        speed = f"{faster:.0%} faster than the first" if faster >= COUNTS.alike else "as fast as the first within 1 %"
        lacks = "offloads" if plan.tier > first.tier else "is tight" if plan.tight else "is less simple"
        return f"{speed}, but it {lacks}"
    theirs = {name: seconds / first.time.tokens * first.time.gpus for name, seconds in first.time.components.items()}
    own = {name: seconds / plan.time.tokens * plan.time.gpus for name, seconds in plan.time.components.items()}
    more = sorted(((own[name] - theirs[name]) * first.speed, name) for name in own)[::-1][:3]
    parts = ", ".join(f"+{share:.0%} for {COMPONENTS[name]}" for share, name in more if share >= COUNTS.alike)
    return f"{longer:.0%} more time per token, mainly {parts}"


def why(request: PlanRequest, plan: Plan) -> str:
    """Return the reasons for a plan, or the resources that it exceeds."""
    if plan.shortfalls:
        if plan.gpu_gib <= plan.cluster.gpu.memory_gib:
            return f"Does not fit: {' and '.join(plan.shortfalls)}."
        largest = sorted(plan.components.items(), key=lambda item: -item[1])[:3]
        most = ", ".join(f"{name.replace('_', ' ')} {size:,.1f}" for name, size in largest)
        return f"Does not fit: {' and '.join(plan.shortfalls)}. Most of it: {most}."
    parts = [*_states(request, plan), *_layout(request, plan)]
    if (kept := plan.setup.gradient_checkpointing) is not True:
        parts.append(TABLES["checkpointing"][kept or "none"])
    elif (without := _gpu_gib(request, plan.setup, gradient_checkpointing=False)) > request.cluster.gpu.memory_gib:
        parts.append(f"checkpointing, because with all activations a GPU would need {without:,.0f} GiB")
    else:
        parts.append("checkpointing, for more room at little cost")
    if plan.tight:
        parts.append(tightness(plan))
    sentence = "; ".join(parts)
    return sentence[0].upper() + sentence[1:] + "."


def tightness(plan: Plan) -> str:
    """Return why a plan is tight, as part of a sentence."""
    most, have = plan.gpu_gib_range[1], plan.cluster.gpu.memory_gib
    return f"tight: likely {plan.gpu_gib:,.1f} GiB, but runs of its kind took up to {most:,.1f} of {have:,.1f}"


def _gpu_gib(request: PlanRequest, setup: TrainingSetup, **changes: Any) -> float:
    return peak_memory(request.profile, replace(setup, **changes), request.cluster).gpu / GIB


def _leanest(setup: TrainingSetup) -> TrainingSetup:
    """Return the setup with one sequence at a time and checkpointing, so that model states dominate the memory."""
    steps = setup.micro_batch_size * setup.gradient_accumulation_steps
    return replace(setup, micro_batch_size=1, gradient_accumulation_steps=steps, gradient_checkpointing=True)


def _states(request: PlanRequest, plan: Plan) -> Iterator[str]:
    setup, have = plan.setup, request.cluster.gpu.memory_gib
    need, would = partial(_gpu_gib, request, _leanest(setup)), "a GPU would need {:,.0f} GiB".format
    if setup.quantized:
        yield f"4-bit weights, because in bf16 {would(need(quantized=False))}"
    if setup.offload_optimizer != "none":
        place = "NVMe" if setup.offload_optimizer == "nvme" else "the CPU"
        what = "weights and optimizer states" if setup.offload_parameters != "none" else "the optimizer states"
        most = need(offload_optimizer="none", offload_parameters="none")
        gain = f"because with them {would(most)}" if most > have else "which leaves room for more sequences"
        yield f"{what} go to {place}, {gain}"
    elif setup.bf16_states:
        yield f"optimizer states rounded to bf16, because in fp32 {would(need(bf16_states=False))}: watch the loss"
    elif setup.layout.pipeline > 1:
        return
    elif setup.zero_stage == 0:
        alone = "everything fits on the GPU, so there is nothing to shard"
        yield alone if setup.world_size == 1 else "everything fits on each GPU, so only gradients are communicated"
    elif setup.zero_ranks == 1:
        lower = _gpu_gib(request, setup) < _gpu_gib(request, setup, zero_stage=0)
        peak = ", but its optimizer step peaks lower" * lower
        yield f"ZeRO-{setup.zero_stage} with one data-parallel rank shards nothing{peak}"
    else:
        what, without, room = {
            1: ("shards the optimizer states", "without it", "it leaves room at no cost"),
            2: ("shards gradients and optimizer states", "without it", "it leaves room at no cost"),
            3: ("shards the weights too", "unsharded", "this leaves room for more sequences"),
        }[setup.zero_stage]
        less = need(zero_stage=setup.zero_stage - 1)
        yield f"ZeRO-{setup.zero_stage} {what}: {f'{without} {would(less)}' if less > have else room}"
    if setup.partition_size > 1:
        yield f"the {setup.partition_size} GPUs of a node share a copy of the weights, so that gathers stay inside it"


def _layout(request: PlanRequest, plan: Plan) -> Iterator[str]:
    setup, layout, cluster = plan.setup, plan.setup.layout, request.cluster
    if layout.tensor > 1:
        if cluster.nodes > 1 and cluster.gpus_per_node % layout.tensor:
            rate = f"{8 * cluster.node_network_gbs:,.0f} Gbit/s"
            yield f"tensor {layout.tensor} spans nodes, as asked: several all-reduces per layer cross {rate} links"
        else:
            yield f"tensor {layout.tensor} stays inside the node because its all-reduces run per layer"
    if layout.pipeline > 1:
        waits = bubble(layout.pipeline, setup.gradient_accumulation_steps)
        across = "goes across nodes " if cluster.nodes > 1 else ""
        yield (
            f"pipeline {layout.pipeline} {across}because only activations pass between stages, which wait {waits:.0%} "
            f"of the time with {setup.gradient_accumulation_steps} micro-batches"
        )
    if layout.sequence > 1:
        fewer = max(size for size in range(1, layout.sequence) if layout.sequence % size == 0)
        where, batch = "on one GPU" if fewer == 1 else f"over {fewer} GPUs", plan.recipe.global_batch_size
        lean = replace(_leanest(setup), layout=replace(layout, sequence=fewer))
        least = memory_range(lean)[1] * _gpu_gib(request, lean)  # the high end decides whether a plan fits
        reason = f"{where} a sequence leaves less room for other sequences"
        if least > cluster.gpu.memory_gib:
            reason = f"{where} a sequence of {setup.sequence_length:,} tokens would need up to {least:,.0f} GiB"
        elif batch < setup.data_parallel_size * layout.sequence // fewer:
            reason = f"{batch} sequences per step are too few for all GPUs without it"
        yield f"sequence {layout.sequence} because {reason}"
    if layout.expert > 1:
        whole = _gpu_gib(request, _leanest(setup), layout=Layout())
        yield f"experts over {layout.expert} GPUs, because with all of them a GPU would need {whole:,.0f} GiB"
