"""The time of a step: each choice costs what it must, over the right link."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_recipes.planning.cost.communication import Group, all_to_all, gather, send, zero_traffic
from deepspeed_recipes.planning.cost.constants import COUNTS, constants
from deepspeed_recipes.planning.cost.states import stage_ranges
from deepspeed_recipes.planning.cost.step_time import StepTime, step_time, updated_bytes
from deepspeed_recipes.planning.cost.training_setup import KNOWN, Software, TrainingSetup
from deepspeed_recipes.planning.hardware.cluster import Cluster, cluster
from deepspeed_recipes.planning.hardware.gpus import find
from deepspeed_recipes.recipe.layout import bubble, rank_position
from deepspeed_recipes.recipe.recipe import Layout, Lora
from tests.profiles import llama, mixture
from tests.tiers import examples


def test_four_stages_and_sixteen_micro_batches_have_a_bubble_of_three_nineteenths():
    even = llama(vocabulary=64)  # no head to speak of: every stage is as long
    setup = TrainingSetup(4, Layout(pipeline=4), zero_stage=0, gradient_accumulation_steps=16)
    time = step_time(even, setup, Cluster(find("H100"), 4))
    busy = time.seconds - time.components["optimizer"] - time.components["zero"]
    assert time.components["bubble"] / busy == pytest.approx(3 / 19)
    assert bubble(4, 16) == 3 / 19


def test_stages_share_layers_and_the_slowest_counts():
    profile = llama(layers=16)
    parts = stage_ranges(profile, 4)
    assert sum(map(len, parts)) == 16
    assert len(parts[-1]) < len(parts[1])  # the head is there
    assert stage_ranges(replace(profile, embedding_parameters=0, head_parameters=0), 4) == (
        range(4),
        range(4, 8),
        range(8, 12),
        range(12, 16),
    )


def test_parts_add_up():
    setup = TrainingSetup(
        16, Layout(tensor=4, pipeline=2), zero_stage=1, micro_batch_size=8, gradient_accumulation_steps=8
    )
    time = step_time(llama(), setup, cluster("H100", gpus=8, nodes=2))
    assert isinstance(time, StepTime)
    assert len(time.components) == 16
    assert time.seconds == pytest.approx(sum(time.components.values()))
    assert time.tokens_per_second_per_gpu == pytest.approx(setup.tokens_per_step / time.seconds / 16)
    assert 0.1 < share_of_the_peak(llama(), time, "H100") < 0.6


def share_of_the_peak(model, time, gpu: str) -> float:
    """Return the share of the peak that two operations per weight and pass are, as if no weight were trained."""
    weights = sum(layer.active_weights for layer in model.layers)
    return 4 * weights * time.tokens_per_second_per_gpu / (find(gpu).bf16_tflops * 1e12)


OF_TRAINER = int(0.9 * 4096**2)
"""What the Trainer prefetches for "auto"."""
BASE = TrainingSetup(
    16,
    Layout(tensor=2),
    zero_stage=3,
    micro_batch_size=2,
    gradient_accumulation_steps=4,
    prefetch_bucket_size=OF_TRAINER,
)
HERE = cluster("H100", gpus=8, nodes=2)


def changed(**changes):
    return step_time(llama(), replace(BASE, **changes), HERE)


def test_each_choice_costs_what_it_must():
    base = changed()
    assert changed(gradient_checkpointing=False).components["recomputation"] == 0
    split = changed(layout=Layout(sequence=2))
    once = changed(layout=Layout(sequence=2), gradient_checkpointing=False)
    assert split.components["sequence"] == pytest.approx(
        1.5 * once.components["sequence"]
    )  # two forward passes and a backward one, or one and one
    assert changed(gradient_checkpointing=False).seconds < base.seconds
    assert (
        changed(lora=Lora()).components["matmul"] < base.components["matmul"] * 0.7
    )  # 4 instead of 6 operations per weight
    assert changed(lora=Lora(dropout=0.1)).components["elementwise"] > changed(lora=Lora()).components["elementwise"]
    assert (
        changed(lora=Lora(), quantized=True).components["elementwise"] > changed(lora=Lora()).components["elementwise"]
    )
    assert changed(lora=Lora()).components["zero"] < base.components["zero"]
    assert changed(attention="eager").seconds > base.seconds
    assert changed(tiled_loss=True).components["logits"] > base.components["logits"]
    assert changed(zero_stage=2).components["zero"] < base.components["zero"]
    assert changed(overlap_comm=False).components["zero"] > base.components["zero"]
    assert (
        changed(partition_size=4).components["zero"] < base.components["zero"]
    )  # the second gathering stays inside the node
    assert changed(precision="fp32").components["matmul"] == pytest.approx(2 * base.components["matmul"])
    assert changed(offload_optimizer="cpu").components["optimizer"] > 5 * base.components["optimizer"]
    assert changed(offload_optimizer="cpu").components["offload"] > 0 == base.components["offload"]
    assert changed(offload_optimizer="nvme").components["nvme"] > 0 == base.components["nvme"]
    assert (
        changed(offload_optimizer="cpu", offload_parameters="cpu").components["offload"]
        > changed(offload_optimizer="cpu").components["offload"]
    )


def test_parallelism_is_paid_for_over_the_right_link():
    alone = TrainingSetup(1, zero_stage=0)
    one = Cluster(find("H100"), 8)
    assert step_time(llama(), alone, one).components["tensor"] == step_time(llama(), alone, one).components["zero"] == 0
    setup = TrainingSetup(8, Layout(tensor=8), zero_stage=0, micro_batch_size=8)
    inside = step_time(llama(), setup, one)
    across = step_time(llama(), setup, Cluster(find("H100"), 4, 2, network_gbs=25.0))
    assert 0 < inside.components["tensor"] * 3 < across.components["tensor"]
    assert (
        step_time(llama(), TrainingSetup(8, Layout(sequence=8), sequence_length=16384), one).components["sequence"] > 0
    )
    spread = step_time(mixture(), TrainingSetup(8, Layout(expert=8), zero_stage=2), one)
    whole = step_time(mixture(), TrainingSetup(8, zero_stage=2), one)
    assert spread.components["expert"] > 0 == whole.components["expert"]
    assert spread.components["zero"] < whole.components["zero"]
    assert 0 < spread.components["optimizer"] < whole.components["optimizer"], (
        "a rank copies the gradients of its own experts alone"
    )
    assert (
        step_time(mixture(chosen=4), TrainingSetup(8), one).components["matmul"]
        > 1.5 * step_time(mixture(), TrainingSetup(8), one).components["matmul"]
    )


def test_what_sequence_parallelism_exchanges_is_joined_before_and_after():
    """`torch.stack` and `torch.cat` of `training.parallel.sequence._exchange`: each reads and writes it."""
    known = replace(constants("H100"), latency=0.0, link=1e9)  # the links take no time
    setup = TrainingSetup(8, Layout(sequence=8), sequence_length=16384)
    taken = step_time(llama(), setup, Cluster(find("H100"), 8), known).components["sequence"]
    heads = llama().attention_heads * 2 + llama().key_value_heads * 2  # queries and outputs, keys and values
    exchanged = 2 * 16384 / 8 * 128 * heads
    passes = 3 * len(llama().layer_order)  # forward, recomputed and backward
    assert taken == pytest.approx(passes * 4 * exchanged / (3350e9 * known.memory), rel=1e-3)


def test_groups_follow_the_placement_of_ranks():
    layout, here = Layout(tensor=2, pipeline=2, sequence=2), Cluster(find("H100"), 8, 4)
    places = {rank: rank_position(layout, rank, here.gpus) for rank in range(here.gpus)}
    mine = places[0]
    groups = {
        Group(2, 1): [r for r, p in places.items() if replace(p, tensor=0) == mine],
        Group(2, 2): [r for r, p in places.items() if replace(p, sequence=0) == mine],
        Group(8, 2): [r for r, p in places.items() if replace(p, sequence=0, data=0) == mine],
        Group(2, 16): [r for r, p in places.items() if replace(p, stage=0) == mine],
    }
    for group, members in groups.items():
        assert members == [index * group.stride for index in range(group.size)]
        assert group.nodes(here) == len({rank // 8 for rank in members})


def test_collectives_take_as_long_as_their_volume():
    known = replace(constants("H100"), latency=0.0)
    one, four = Cluster(find("H100"), 8), Cluster(find("H100"), 8, 4, network_gbs=100.0)
    inside, between = 450e9 * known.link, 100e9 * known.network
    assert gather(8e9, Group(8, 1), one, known) == pytest.approx(7e9 / inside)
    # 24 GB come into each node, once; eight groups of one rank each per node share the same network.
    assert gather(32e9, Group(32, 1), four, known) == pytest.approx(24e9 / between)
    assert gather(32e9, Group(4, 8), four, known) == pytest.approx(8 * 24e9 / between)
    assert all_to_all(8e9, Group(8, 1), one, known) == pytest.approx(7e9 / inside)
    assert all_to_all(32e9, Group(32, 1), four, known) == pytest.approx(8 * 24e9 / between)
    assert send(1e9, Group(4, 2), one, known) == pytest.approx(1e9 / inside)
    assert send(1e9, Group(4, 8), four, known) == pytest.approx(8e9 / between)
    assert gather(8e9, Group(1, 1), one, known) == all_to_all(8e9, Group(1, 1), one, known) == 0


SETUPS = st.builds(
    lambda layout, copies, **rest: TrainingSetup(
        layout.tensor * layout.pipeline * layout.sequence * copies, layout, **rest
    ),
    layout=st.builds(
        Layout,
        tensor=st.sampled_from([1, 2, 8]),
        pipeline=st.sampled_from([1, 2, 4]),
        sequence=st.sampled_from([1, 2]),
    ),
    copies=st.sampled_from([1, 2, 8]),
    zero_stage=st.sampled_from([0, 1, 2, 3]),
    micro_batch_size=st.sampled_from([1, 4]),
    gradient_accumulation_steps=st.sampled_from([1, 8]),
    sequence_length=st.sampled_from([512, 8192]),
    gradient_checkpointing=st.booleans(),
    attention=st.sampled_from(["sdpa", "eager"]),
    lora=st.sampled_from([None, Lora()]),
    overlap_comm=st.booleans(),
    offload_optimizer=st.sampled_from(["none", "cpu", "nvme"]),
)


@settings(max_examples=examples(200), deadline=None)
@given(SETUPS, st.sampled_from(["A100 40GB", "H100", "RTX 4090", "T4"]), st.sampled_from([1, 4, 8]))
def test_better_hardware_is_never_slower(setup, name, per_node):
    gpu = find(name)
    here = Cluster(gpu, min(per_node, setup.world_size), -(-setup.world_size // per_node), network_gbs=25.0)
    time = step_time(llama(), setup, here)
    assert all(value >= 0 for value in time.components.values())
    assert 0 < share_of_the_peak(llama(), time, name) < 1
    better = [
        replace(here, network_gbs=50.0),
        replace(here, nvme_gbs=6.0),
        *(
            replace(here, gpu=replace(gpu, **{figure: 2 * getattr(gpu, figure)}))
            for figure in ("memory_gbs", "link_gbs", "pcie_gbs")
        ),
    ]
    for other in better:
        assert step_time(llama(), setup, other).seconds <= time.seconds * (1 + 1e-9)


@settings(max_examples=examples(100), deadline=None)
@given(SETUPS)
def test_more_work_is_never_faster(setup):
    here = Cluster(find("H100"), 8, -(-setup.world_size // 8))
    seconds = step_time(llama(), setup, here).seconds
    assert (
        step_time(
            llama(), replace(setup, gradient_accumulation_steps=2 * setup.gradient_accumulation_steps), here
        ).seconds
        > seconds
    )
    assert step_time(llama(), replace(setup, sequence_length=2 * setup.sequence_length), here).seconds > seconds
    assert step_time(llama(layers=40), setup, here).seconds > seconds
    assert step_time(llama(), replace(setup, gradient_checkpointing=True), here).seconds >= seconds


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_collectives_take_as_long_as_their_bytes(stage, micro_batches):
    """An all-reduce passes its bytes twice: what `zero_traffic` counts, which profiles of ranks confirm."""
    known = replace(constants("H100"), latency=0.0, hook=0.0)
    setup = TrainingSetup(
        8, zero_stage=stage, overlap_comm=False, gradient_accumulation_steps=micro_batches, kept_weights=0
    )
    one = cluster("H100", 8)
    model = llama()
    total = model.parameters
    sent = zero_traffic(stage, total, total, 2, micro_batches, kept=0)
    passed = sum(size * (2 if kind == "all-reduce" else 1) for kind, size in sent.items()) * 7 / 8
    seconds = passed / (one.gpu.link_gbs * 1e9 * known.link)
    assert step_time(model, setup, one, known).components["zero"] == pytest.approx(seconds, rel=0.02)


@pytest.mark.parametrize(("stage", "per_weight"), [(1, 0.8e-4), (3, 1.3e-4)])
def test_a_small_models_step_is_launched_weight_by_weight(stage, per_weight):
    """Where moving its bytes takes no time, and no less where it does."""
    model, one, known = llama(), cluster("H100", 8), constants("H100")

    def seconds(memory):
        return step_time(model, TrainingSetup(8, zero_stage=stage), one, replace(known, memory=memory)).components[
            "optimizer"
        ]

    weights = len(model.layer_kinds[0].linears) + 2
    assert seconds(1e6) == pytest.approx(per_weight * weights * len(model.layer_order), rel=1e-3)
    assert seconds(known.memory) > seconds(1e6)
    adapters = TrainingSetup(8, zero_stage=stage, lora=Lora(target_modules="all-linear"))
    launched = step_time(model, adapters, one, replace(known, memory=1e6)).components["optimizer"]
    assert launched == pytest.approx(seconds(1e6) * 2 * (weights - 2) / weights, rel=1e-3), "two for each matrix"


@pytest.mark.parametrize(
    ("stage", "ranks", "micro_batches", "per_parameter"),
    [(0, 1, 1, 40), (1, 8, 4, 72 / 8 + 12), (2, 8, 4, 72 / 8 + 4 * 12), (3, 8, 4, 72 / 8 + 4 * 12), (2, 1, 1, 72 + 12)],
)
def test_a_step_moves_the_bytes_that_were_counted(stage, ranks, micro_batches, per_parameter):
    """What tests/workers/moved_bytes.py counts: the step's on each rank's own, the reductions' on all it trains."""
    model, one, known = llama(), cluster("H100", 8), replace(constants("H100"), memory=1e-4)
    setup = TrainingSetup(ranks, zero_stage=stage, gradient_accumulation_steps=micro_batches)
    moved = step_time(model, setup, one, known).components["optimizer"] * one.gpu.memory_gbs * 1e9 * known.memory
    assert moved / model.parameters == pytest.approx(per_parameter, rel=1e-3)


def test_a_step_copies_the_gradients_of_a_ranks_own_experts_alone():
    one, known, model = cluster("H100", 8), replace(constants("H100"), memory=1e-4), mixture()
    experts = sum(model.layer_kinds[kind].expert_parameters for kind in model.layer_order) / model.parameters
    whole, spread = (
        step_time(model, TrainingSetup(8, layout, zero_stage=1), one, known).components["optimizer"]
        for layout in (Layout(), Layout(expert=8))
    )
    assert spread / whole == pytest.approx((72 / 8 + 12 * (1 - experts * 7 / 8)) / (72 / 8 + 12), rel=1e-3)


@pytest.mark.parametrize(("stage", "beside"), [(0, 12), (1, 44), (3, 44)])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("bf16_states", [False, True])
def test_adam_moves_three_times_as_much_operation_by_operation(stage, beside, foreach, bf16_states):
    """Counted in tests/workers/moved_bytes.py; in bf16 each number is half as wide, but not the norm in fp64."""
    setup = TrainingSetup(8, zero_stage=stage, software=Software(foreach_adam=foreach), bf16_states=bf16_states)
    adam = (84 if foreach else 28) / (2 if bf16_states else 1)
    assert updated_bytes(setup) == adam + ({12: 6, 44: 32}[beside] if bf16_states else beside)


def test_tools_with_an_adam_of_many_operations_move_more():
    moved = {name: updated_bytes(TrainingSetup(8, zero_stage=1, software=one)) for name, one in KNOWN.items()}
    own = updated_bytes(TrainingSetup(8, zero_stage=1))
    assert {name for name in KNOWN if moved[name] > own} == {"trl", "llama-factory", "transformers-4"}


def test_zero_3_gathers_as_many_matrices_at_once_as_it_prefetches():
    """The launcher prefetches a layer; with the Trainer's 0.9 of the hidden size squared each matrix is one message."""
    model, known = llama(), replace(constants("H100"), latency=1.0)  # so slow that nothing else counts
    setup = TrainingSetup(8, zero_stage=3, overlap_comm=False, lora=Lora(), kept_weights=0)
    # Gradients of adapters fit into a bucket.
    layers, matrices = len(model.layer_order), len(model.layer_kinds[0].linears)

    def messages(**changes):
        return step_time(model, replace(setup, **changes), cluster("H100", 8), known).components["zero"]

    reductions = 2
    assert messages(prefetch_bucket_size=OF_TRAINER) == pytest.approx((2 * layers * matrices + reductions), rel=0.05)
    assert messages(prefetch_bucket_size=10**9) == pytest.approx(2 * layers + reductions, rel=0.05)


def test_zero_3_gathers_once_what_it_still_holds():
    """A model of a billion parameters is whole at the end of its forward pass, unless that is limited."""
    setup = TrainingSetup(8, zero_stage=3, overlap_comm=False)
    known = replace(constants("H100"), latency=0.0)
    small = llama(hidden=1024, wide=3584, layers=8, heads=8, vocabulary=32000)
    one = step_time(small, setup, cluster("H100", 8), known)
    other = step_time(small, replace(setup, kept_weights=0), cluster("H100", 8), known)
    assert other.components["zero"] / one.components["zero"] == pytest.approx(1.5, rel=0.02)
    large = [step_time(llama(), replace(setup, kept_weights=kept), cluster("H100", 8)) for kept in (10**9, 0)]
    assert 1.01 < large[1].components["zero"] / large[0].components["zero"] < 1.05


def test_adam_on_the_host_is_as_fast_as_its_memory_or_its_cores():
    setup = TrainingSetup(1, zero_stage=2, offload_optimizer="cpu")

    def seconds(gpu, gpus=1, cores=0):
        one = replace(cluster(gpu, gpus), cores=cores)
        return step_time(llama(), setup, one).components["optimizer"]

    updated = llama().parameters * COUNTS.cpu_step
    assert seconds("A100 80GB") == pytest.approx(updated / 4e9, rel=0.05), "the paper's host"
    assert seconds("H100") == pytest.approx(updated / 4e9 * 256 / 614, rel=0.05)
    assert seconds("RTX 4090") == pytest.approx(updated / 4e9 * 256 / 90, rel=0.05)
    assert seconds("RTX 4090", gpus=8) < seconds("RTX 4090", gpus=2), "eight are in a server"
    assert seconds("A10G", cores=4) == pytest.approx(updated / (2 * COUNTS.core_adam), rel=0.05), (
        "two cores of a small instance"
    )
    assert seconds("A10G", cores=192) == seconds("A10G")


def test_matrices_that_a_token_does_not_use_take_no_time():
    """A token of a layer with, say, several towers is multiplied with some of its matrices only."""
    whole = llama()
    (kind,) = whole.layer_kinds
    half = replace(whole, layer_kinds=(replace(kind, active_weights=kind.active_weights / 2),))
    assert step_time(half, BASE, HERE).components["matmul"] == pytest.approx(
        step_time(whole, BASE, HERE).components["matmul"] / 2, rel=0.01
    )
