"""Why a plan is as it is, in one sentence, each part with the number that decided it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from recipes.planning.memory import peak
from recipes.planning.plans import GIB, REFUSE, WARN, Job, Plan
from recipes.planning.setup import Setup
from recipes.spec.layout import bubble
from recipes.spec.recipe import Layout


def why(job: Job, plan: Plan) -> str:
    """Return the reasons for a plan, or what it is short of."""
    if not plan.fits:
        return f"Does not fit: {' and '.join(plan.short)}."
    parts = [*_states(job, plan), *_splits(job, plan), *_activations(job, plan)]
    if plan.tight:
        parts.append(f"tight: above {WARN:.0%} of the memory, so a longer row may end it")
    sentence = "; ".join(parts)
    return sentence[0].upper() + sentence[1:] + "."


def _gpu(job: Job, setup: Setup, **changes: Any) -> float:
    """Return the GiB that a GPU would need otherwise."""
    return peak(job.anatomy, replace(setup, **changes), job.cluster).worst.total / GIB


def _leanest(setup: Setup) -> Setup:
    """Return the same with one row at a time and checkpointing: what has to fit for the states' sake."""
    rows = setup.micro_batch_size * setup.accumulation
    return replace(setup, micro_batch_size=1, accumulation=rows, gradient_checkpointing=True)


def _states(job: Job, plan: Plan) -> Iterator[str]:
    setup, have = plan.setup, REFUSE * job.cluster.gpu.memory_gib
    lean = _leanest(setup)
    if setup.quantized:
        yield f"4-bit weights, which in bf16 would make it {_gpu(job, lean, quantized=False):,.0f} GiB per GPU"
    if setup.offload_optimizer != "none":
        place = "NVMe" if setup.offload_optimizer == "nvme" else "the CPU"
        what = "weights and optimizer states" if setup.offload_parameters != "none" else "the optimizer's states"
        without = _gpu(job, lean, offload_optimizer="none", offload_parameters="none")
        yield f"{what} go to {place}, the last resort, because with them a GPU would need {without:,.0f} GiB"
    elif setup.bf16_states:
        without = _gpu(job, lean, bf16_states=False)
        yield f"optimizer states rounded to bf16, because in fp32 a GPU would need {without:,.0f} GiB: watch the loss"
    elif setup.layout.pipeline > 1:
        return
    elif setup.stage == 0:
        alone = "everything fits on the GPU, so there is nothing to shard"
        yield alone if setup.world_size == 1 else "everything fits on each GPU, so only gradients are sent"
    elif setup.zero_ranks == 1:
        yield f"ZeRO-{setup.stage} on one GPU shards nothing, and its optimizer step takes less for a moment"
    elif setup.stage < 3:
        what = "the optimizer's states" if setup.stage == 1 else "gradients and the optimizer's states"
        without = _gpu(job, lean, stage=setup.stage - 1)
        room = f"without it a GPU would need {without:,.0f} GiB" if without > have else "it leaves room at no cost"
        yield f"ZeRO-{setup.stage} shards {what}: {room}"
    else:
        without = _gpu(job, lean, stage=2)
        room = f"unsharded a GPU would need {without:,.0f} GiB" if without > have else "that leaves room for more rows"
        yield f"ZeRO-3 shards the weights too: {room}"
    if setup.partition_size > 1:
        yield f"the {setup.partition_size} GPUs of a node keep a copy of the weights, which keeps gathers in it"


def _splits(job: Job, plan: Plan) -> Iterator[str]:
    setup, layout, cluster = plan.setup, plan.setup.layout, job.cluster
    lean = _leanest(setup)
    if layout.tensor > 1:
        yield f"tensor {layout.tensor} stays inside the node because its all-reduces run per layer"
    if layout.pipeline > 1:
        waits = bubble(layout.pipeline, setup.accumulation)
        across = "goes across nodes " if cluster.nodes > 1 else ""
        yield (
            f"pipeline {layout.pipeline} {across}because only activations pass between stages, which wait {waits:.0%} "
            f"of the time with {setup.accumulation} micro-batches"
        )
    if layout.sequence > 1:
        fewer = max(size for size in range(1, layout.sequence) if layout.sequence % size == 0)
        with_fewer = _gpu(job, lean, layout=replace(layout, sequence=fewer))
        if with_fewer > REFUSE * cluster.gpu.memory_gib:
            where = "on one GPU" if fewer == 1 else f"over {fewer} GPUs"
            reason = f"a row of {setup.sequence_length:,} tokens would need {with_fewer:,.0f} GiB {where}"
        else:
            reason = f"{plan.recipe.global_batch_size} rows per step do not go round without it"
        yield f"sequence {layout.sequence} because {reason}"
    if layout.expert > 1:
        whole = _gpu(job, lean, layout=Layout())
        yield f"experts over {layout.expert} GPUs, because whole on every GPU they would make it {whole:,.0f} GiB"


def _activations(job: Job, plan: Plan) -> Iterator[str]:
    setup = plan.setup
    if not setup.gradient_checkpointing:
        yield "activations fit, so nothing is computed twice"
        return
    without = _gpu(job, setup, gradient_checkpointing=False)
    if without > REFUSE * job.cluster.gpu.memory_gib:
        yield f"checkpointing, because with all activations a GPU would need {without:,.0f} GiB"
    else:
        yield "checkpointing, for room at little cost"
