"""Compute time beside attention: what host, adapters, 4-bit weights, fused kernels and experts add or save."""

from dataclasses import replace
from math import prod

import pytest

from deepspeed_recipes.planning.cost.compute_time import (
    Job,
    adapted_share,
    experts_alone,
    head_seconds,
    host_seconds,
    kernels,
    layer_seconds,
    product_seconds,
    trained_weights,
)
from deepspeed_recipes.planning.cost.constants import COUNTS, constants
from deepspeed_recipes.planning.cost.step_time import step_time
from deepspeed_recipes.planning.cost.training_setup import KNOWN, Software, TrainingSetup
from deepspeed_recipes.planning.hardware.cluster import Cluster
from deepspeed_recipes.planning.hardware.gpus import find
from deepspeed_recipes.recipe.recipe import Layout, Lora
from scripts.maintain.calibration import calibrate
from scripts.maintain.calibration.published_rows import published_rows
from tests.profiles import llama, mixture

ROWS = [row for row in published_rows() if row.share == "fitted"]
A100, H100 = Cluster(find("A100 80GB"), 8), Cluster(find("H100"), 8)
BASE = TrainingSetup(1, zero_stage=0, sequence_length=4096)


def error(applies, known=None) -> float:
    """Return the mean error over published rows of the fitted share."""
    runs = calibrate.published_runs([row for row in ROWS if applies(row)])
    assert len(runs) >= 3
    speeds = [
        step_time(
            run.profile, run.setup, run.cluster, replace(constants(run.cluster.gpu.name), **known) if known else None
        ).tokens_per_second_per_gpu
        for run in runs
    ]
    pairs = zip(speeds, runs, strict=True)
    return sum(abs(speed / run.tokens_per_second_per_gpu - 1) for speed, run in pairs) / len(runs)


def test_short_steps_take_as_long_as_their_host_needs():
    def short(row):
        return row.table == "qwen" and (row.sequence_length or 0) <= 512

    assert error(short) < 0.1
    assert error(short, {"hook": 0.0}) > 0.35
    assert error(short, {"launch": 0.0}) > 0.2


def test_hooks_wait_for_the_other_ranks_of_a_node():
    """On two CPU ranks a layer's hooks took 1.4 times as long as on one (deepspeed 0.14.2 and 0.19.8)."""
    kind, known = llama().layer_kinds[0], replace(constants("H100"), launch=0.0)
    taken = COUNTS.gradient_hook * trained_weights(kind, BASE)
    alone, pair, node, nodes = (
        sum(host_seconds(kind, replace(BASE, zero_stage=3, world_size=ranks), known)) - taken for ranks in (1, 2, 8, 64)
    )
    assert alone == pytest.approx((1 + COUNTS.backward_hooks) * known.hook * kind.modules)
    assert 1.1 < pair / alone < 1.5
    assert node / alone == pytest.approx(1 + 7 * known.waiting) and nodes == node


def test_zero_takes_each_trained_weights_gradient_by_itself():
    """Its hooks are Python's, those of DDP are not."""
    kind, known = llama().layer_kinds[0], constants("H100")
    (ahead, plain), first, second = (host_seconds(kind, replace(BASE, zero_stage=stage), known) for stage in range(3))
    hooked = pytest.approx(plain + COUNTS.gradient_hook * kind.modules)
    assert first == second == (ahead, hooked)
    four = replace(BASE, zero_stage=1, gradient_accumulation_steps=4)
    last = pytest.approx(plain + COUNTS.gradient_hook * kind.modules / 4)
    assert host_seconds(kind, four, known)[1] == last, "one pass of four"
    adapted = replace(BASE, lora=Lora(rank=8), zero_stage=1)
    more = host_seconds(kind, adapted, known)[1] - host_seconds(kind, replace(adapted, zero_stage=0), known)[1]
    assert more == pytest.approx(COUNTS.gradient_hook * 2 * len(kind.linears)), "of adapters, two for each matrix"


def test_each_pass_waits_for_its_own_launches():
    """A backward pass with much to compute does not make up for a forward pass that the host holds up."""
    kind, sharded = llama().layer_kinds[0], replace(BASE, zero_stage=3, gradient_checkpointing=False)
    known = replace(constants("H100"), gap=0.0)

    def launch(setup, **changes):
        return layer_seconds(Job(llama(), setup, H100, replace(known, **changes)), kind)["launch"]

    assert launch(sharded, hook=0.0) == 0.0  # with 4,096 tokens the GPU is busy for longer
    slow = 10.0  # seconds per module: nothing else counts
    modules = kind.modules
    assert launch(sharded, hook=slow) == pytest.approx((1 + COUNTS.backward_hooks) * slow * modules, rel=0.01)
    again = replace(sharded, gradient_checkpointing=True)
    assert launch(again, hook=slow) == pytest.approx((2 + COUNTS.backward_hooks) * slow * modules, rel=0.01)
    # So slow that a forward pass has to wait, and a backward pass, which computes twice as much, does not.
    forward = layer_seconds(Job(llama(), sharded, H100, known), kind)
    busy = (forward["matmul"] + forward["attention"] + forward["elementwise"]) / 3
    assert 0 < launch(sharded, hook=1.3 * busy / modules) < 0.5 * busy


def test_consumer_gpus_reach_more_of_their_datasheet():
    def consumer(row):
        return row.gpu == "RTX 4090" and row.sequence_length == 2048

    assert error(consumer) < 0.06
    assert error(consumer, {"matmul": constants("A100 80GB").matmul}) > 0.15


def test_geforce_gpus_reach_each_other_through_the_host():
    def gathers(row):
        return row.gpu == "RTX 3090" and row.method == "lora" and row.offload == "none" and row.gpus > 1

    assert error(gathers) < 0.1
    assert error(gathers, {"peer": 0.0}) > 0.3


def test_kernels_are_counted_by_what_a_layer_has():
    dense, routed = llama().layer_kinds[0], mixture().layer_kinds[0]
    assert kernels(dense, BASE) == COUNTS.kernels
    assert kernels(dense, replace(BASE, lora=Lora())) == COUNTS.kernels + 7 * COUNTS.adapter_kernels
    assert kernels(dense, replace(BASE, liger_kernel=True)) < COUNTS.kernels
    assert kernels(routed, BASE) == COUNTS.kernels
    alone = pytest.approx(COUNTS.kernels + 8 * COUNTS.expert_kernels, rel=1e-3)
    assert kernels(routed, replace(BASE, software=Software(grouped_experts=False))) == alone
    hooks = replace(constants("H100"), launch=0.0, hook=1.0)
    assert host_seconds(dense, replace(BASE, lora=Lora(), zero_stage=3), hooks)[0] == 23


def elementwise(**changes) -> float:
    return step_time(llama(), replace(BASE, **changes), A100).components["elementwise"]


def test_fused_kernels_move_less_and_fp32_more():
    assert elementwise(liger_kernel=True) == elementwise(compile=True) < 0.5 * elementwise()
    lora = Lora(dropout=0.1)
    assert elementwise(lora=lora, software=Software(fp32_adapters=True)) > 1.3 * elementwise(lora=lora)
    quantized = {"lora": lora, "quantized": True}
    assert elementwise(**quantized, software=Software(fp32_activations=True)) > 1.4 * elementwise(**quantized)


def test_adapters_cost_where_they_are():
    kind = llama().layer_kinds[0]
    some = replace(kind, adapter_parameters={"lora": 0.0, "lora rank": 4096 * 2 + 4096 + 1024})
    setup = replace(BASE, lora=Lora(target_modules="all-linear"))
    assert adapted_share(kind, setup) == 1
    assert adapted_share(some, setup) == pytest.approx(13312 / sum(map(sum, kind.linears)))
    fewer, all_of_them = (replace(llama(), layer_kinds=(one,)) for one in (some, kind))
    assert (
        step_time(fewer, setup, A100).components["elementwise"]
        < 0.8 * step_time(all_of_them, setup, A100).components["elementwise"]
    )
    reduced, known = replace(setup, world_size=8, zero_stage=1), replace(constants("A100 80GB"), latency=0.0)
    sent = [step_time(one, reduced, A100, known).components["zero"] for one in (fewer, all_of_them)]
    assert sent[0] / sent[1] == pytest.approx(adapted_share(some, setup)), "gradients of the adapted matrices alone"


def test_offloaded_weights_travel_in_four_bits_and_are_hidden_like_collectives():
    setup = replace(BASE, zero_stage=3, lora=Lora(), offload_optimizer="cpu", offload_parameters="cpu")
    whole = step_time(llama(), setup, A100).components["offload"]
    packed = step_time(llama(), replace(setup, quantized=True), A100).components["offload"]
    assert packed < 0.4 * whole
    assert step_time(llama(), replace(setup, overlap_comm=False), A100).components["offload"] > whole


def test_unpacking_four_bits_does_not_depend_on_the_batch():
    def added(size: int) -> float:
        setup = replace(BASE, lora=Lora(), micro_batch_size=size)
        return elementwise(**vars(replace(setup, quantized=True))) - elementwise(**vars(setup))

    assert added(8) == pytest.approx(added(1))


def test_experts_one_by_one_are_launched_one_by_one():
    # As Qwen3-30B-A3B: 128 experts of 768 x 2048.
    wide, one = mixture().layer_kinds[0], 3 * 768 * 2048
    shared = sum(inputs * outputs for inputs, outputs in wide.linears)
    small = replace(
        wide,
        parameters=shared + 128 * one,
        expert_parameters=128 * one,
        active_weights=shared + 8 * one,
        experts_per_token=8,
    )
    many = replace(mixture(), layer_kinds=(small,))
    grouped = step_time(many, BASE, H100)
    single = step_time(many, replace(BASE, software=Software(grouped_experts=False)), H100)
    alone = replace(BASE, software=Software(grouped_experts=False))
    assert experts_alone(small, alone) == pytest.approx(128, rel=1e-3)
    assert experts_alone(small, replace(alone, layout=Layout(expert=8))) == pytest.approx(16, rel=1e-3)
    assert experts_alone(small, BASE) == experts_alone(llama().layer_kinds[0], alone) == 0
    assert single.components["launch"] > grouped.components["launch"]
    assert single.seconds > grouped.seconds


def test_few_tokens_read_every_expert():
    def forward(profile, tokens: int) -> float:
        setup = replace(BASE, sequence_length=tokens, gradient_checkpointing=False)
        return layer_seconds(Job(profile, setup, H100, constants("H100")), profile.layer_kinds[0])["matmul"]

    few, many = mixture(experts=8, chosen=2), mixture(experts=256, chosen=2)
    assert forward(many, 65536) == pytest.approx(forward(few, 65536), rel=0.01)
    # Three times 256 experts of 176 million bf16 weights, at most at the speed of the memory.
    assert forward(many, 64) > 3 * 256 * 3 * 4096 * 14336 * 2 / 3.35e12


def test_adapters_in_fp32_move_more():
    def moved(software: Software) -> float:
        return step_time(llama(), replace(BASE, lora=Lora(), software=software), H100).components["elementwise"]

    own = moved(Software())
    assert {name for name, one in KNOWN.items() if moved(one) > own} == {"peft", "trl", "llama-factory"}


def test_preferences_compute_both_answers_and_the_reference():
    single, pairs = (
        step_time(llama(), replace(BASE, reference=on, sequences_per_example=1 + on), H100) for on in (False, True)
    )
    assert pairs.tokens == 2 * single.tokens
    assert pairs.components["matmul"] > 1.8 * single.components["matmul"]
    assert pairs.components["recomputation"] > 3.6 * single.components["recomputation"]
    assert pairs.tokens_per_second_per_gpu < single.tokens_per_second_per_gpu


def test_a_tiled_feed_forward_part_is_computed_once_more():
    kind = llama().layer_kinds[0]
    fused = replace(kind, linears=(*kind.linears[:4], (4096, 2 * 14336), (14336, 4096)))
    assert [sum(map(prod, one.feed_forward)) for one in (kind, fused)] == 2 * [3 * 14336 * 4096]
    whole, tiled = (step_time(llama(), replace(BASE, tiled_mlp=on), H100) for on in (False, True))
    assert whole.components["recomputation"] < tiled.components["recomputation"] < 2 * whole.components["recomputation"]
    assert tiled.components["matmul"] == whole.components["matmul"]
    again = tiled.components["recomputation"] - whole.components["recomputation"]
    forward = (whole.components["matmul"] + whole.components["elementwise"]) / 3
    assert again / forward == pytest.approx(3 * 14336 / (3 * 14336 + 2 * 4096 + 2 * 1024), rel=0.01)


@pytest.mark.parametrize(
    ("changes", "per_logit"),
    [
        ({}, 30),
        ({"tiled_loss": True}, 14 + 8 * 4096 * (1 / 4096 + 1 / 8192)),
        ({"tiled_loss": True, "lora": Lora()}, 14 + 8 * 4096 / 8192),
    ],
)
def test_a_loss_in_tiles_moves_no_fp32_copies_of_logits(changes, per_logit):
    setup, known = replace(BASE, **changes), constants("H100")
    logits = setup.sequence_length * llama().vocab_size
    moved = [
        head_seconds(Job(llama(), setup, H100, replace(known, memory=share))) * H100.gpu.memory_gbs * 1e9
        for share in (1.0, 0.5)
    ]
    assert (moved[1] - moved[0]) / logits == pytest.approx(per_logit)


def test_fused_adapters_take_fewer_passes_and_launches():
    """PEFT scales and adds in passes of their own; here a product adds to what is there (`model.fused_lora`)."""
    plain, fused = (replace(BASE, lora=Lora(target_modules="all-linear", fused=each)) for each in (False, True))
    slow, fast = (step_time(llama(), setup, H100).components for setup in (plain, fused))
    assert fast["elementwise"] < slow["elementwise"] and fast["matmul"] == slow["matmul"]
    assert fast["launch"] <= slow["launch"]
    (kind,) = llama().layer_kinds
    saved = 2 * len(kind.linears) * (COUNTS.adapter_kernels - COUNTS.fused_adapter_kernels) / 2
    assert kernels(kind, plain) - kernels(kind, fused) == saved
    moved = (slow["elementwise"] - fast["elementwise"]) * H100.gpu.memory_gbs * 1e9 * constants("H100").memory
    per_token = moved / BASE.sequence_length / len(llama().layer_order)
    widths = [sum(each) for each in zip(*kind.linears, strict=True)]
    assert per_token == pytest.approx((6 - 4) * widths[0] + (18 - 4) * widths[1])


def test_a_product_that_fills_few_waves_of_tiles_is_slower_by_their_share():
    job = Job(llama(), BASE, H100, constants("H100"))
    ideal = 2 * 4096 * 4096 * 4096 / (job.peak * job.known.matmul)
    for rows in (4096, 1024, 256):
        waves = rows * 4096 / (COUNTS.product_tile * H100.gpu.units)
        taken = product_seconds(job, rows, 4096, 4096)
        assert taken / (ideal * rows / 4096) - 1 == pytest.approx(job.known.waves / waves)
