"""Predicted memory: well-known examples, and properties that hold for every way to train."""

import subprocess
import sys
from dataclasses import replace

import pytest
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadParamConfig
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_recipes.planning.cost import activations
from deepspeed_recipes.planning.cost.activations import is_masked, layer_bytes
from deepspeed_recipes.planning.cost.constants import COUNTS
from deepspeed_recipes.planning.cost.memory import peak_memory
from deepspeed_recipes.planning.cost.states import NF4, held_bytes, of_stage, stage_shards, state_bytes
from deepspeed_recipes.planning.cost.training_setup import TrainingSetup, training_setup
from deepspeed_recipes.planning.hardware.cluster import Cluster
from deepspeed_recipes.planning.hardware.gpus import find
from deepspeed_recipes.planning.model_profile import lookup
from deepspeed_recipes.recipe import deepspeed_file, pages
from deepspeed_recipes.recipe.recipe import Layout, Lora
from tests import ROOT
from tests.tiers import examples

GIB = 2**30
NODE = Cluster(find("H100"), gpus_per_node=8)
MODELS = {"llama3": "8b", "qwen3": "4b", "gemma3": "1b", "mistral": "24b", "qwen3_moe": "30b-a3b"}


def profile_of(family, size, lora=None):
    return lookup.profile_of(pages.page(family).SIZES[size].config, lora)


def planned(name, variant, gpus, **changes):
    """Return the memory that a recipe of the catalogue needs with its own DeepSpeed file."""
    recipe = replace(pages.find(name, variant), **changes)
    setup = training_setup(recipe, deepspeed_file.read(ROOT / "configs" / recipe.deepspeed), gpus)
    cluster = replace(NODE, gpus_per_node=min(gpus, 8), nodes=max(1, gpus // 8))
    return peak_memory(lookup.profile_of(recipe.model.config, recipe.lora), setup, cluster)


def test_seven_billion_parameters_in_mixed_precision_are_112_gb():
    for stage, ranks, size in ((0, 1, 112e9), (3, 8, 14e9)):
        assert sum(vars(state_bytes(7e9, TrainingSetup(ranks, zero_stage=stage))).values()) == pytest.approx(size)


def optimizer_bytes(optimizer, stage=3, precision="bf16"):
    recipe = replace(pages.find("llama3-8b", "full"), optimizer=optimizer, max_grad_norm=0.0, precision=precision)
    setup = training_setup(recipe, deepspeed_file.DeepSpeedFile(stage=stage), 8)
    profile = lookup.profile_of(recipe.model.config)
    return held_bytes(stage_shards(profile, setup)[0], setup, "backward")["optimizer"] / (8.03e9 / 8)


def test_each_optimizer_holds_its_moments():
    assert optimizer_bytes("adamw") == pytest.approx(12, rel=0.01)
    assert optimizer_bytes("adamw_8bit") == pytest.approx(4 + 2 + 2 * 4 / 256, rel=0.01)
    matrices = 6.98 / 8.03  # those of the layers; embedding and head have 0.53e9 weights each
    assert optimizer_bytes("muon") == pytest.approx(12 - 6 * matrices, rel=0.01)
    assert optimizer_bytes("muon", 3, "fp32") == pytest.approx(12 - 4 * matrices, rel=0.01)
    assert optimizer_bytes("muon", 2) == pytest.approx(12 - 4 * matrices, rel=0.01)
    assert optimizer_bytes("muon", 2, "fp32") == pytest.approx(12, rel=0.01)


@pytest.mark.parametrize(
    ("name", "variant", "gpus", "limit", "changes"),
    [
        ("llama3-8b", "qlora", 1, 24, {}),
        ("llama3-8b", "full", 8, 80, {}),
        ("phi4-14b", "full", 8, 80, {}),
        ("llama3-70b", "lora", 8, 80, {}),
        ("llama3-70b", "qlora", 1, 80, {}),
        ("llama3-70b", "three_d", 64, 80, {}),
        ("qwen3-0.6b", "full", 1, 24, {}),
    ],
)
def test_what_is_known_to_fit_fits(name, variant, gpus, limit, changes):
    assert planned(name, variant, gpus, **changes).gpu < limit * GIB


@pytest.mark.parametrize(
    ("name", "variant", "gpus", "limit", "changes"),
    [
        ("llama3-8b", "full", 1, 80, {}),
        ("llama3-8b", "lora", 1, 16, {}),
        ("llama3-70b", "full", 8, 80, {}),
        ("llama3-70b", "lora", 1, 80, {}),
        ("llama3-8b", "full", 8, 80, {"gradient_checkpointing": False, "sequence_length": 32768}),
    ],
)
def test_what_is_known_not_to_fit_does_not(name, variant, gpus, limit, changes):
    assert planned(name, variant, gpus, **changes).gpu > limit * GIB


def test_a_trillion_parameters_train_from_nvme():
    """ZeRO-Infinity's promise (arXiv:2104.07857): what does not fit is on NVMe, one layer at a time on the GPU."""
    llama = profile_of("llama3", "70b")
    large = replace(llama, layer_order=llama.layer_order * 15)
    assert large.parameters > 1e12
    offloaded = {"offload_optimizer": "nvme", "offload_parameters": "nvme", "reduce_bucket_size": 5 * 10**7}
    found = peak_memory(large, TrainingSetup(64, sequence_length=2048, **offloaded), replace(NODE, nodes=8))
    assert found.gpu < 80 * GIB
    assert found.nvme_gib * GIB == pytest.approx(14 * large.parameters / 8)  # 12 bytes and the weights' 2, on 8 nodes


def setups(**fixed):
    choices = {
        "world_size": st.sampled_from([2, 4, 8, 16, 64]),
        "zero_stage": st.sampled_from([1, 2, 3]),
        "micro_batch_size": st.sampled_from([1, 2, 4]),
        "gradient_accumulation_steps": st.sampled_from([1, 4]),
        "sequence_length": st.sampled_from([512, 4096, 32768]),
        "packing": st.booleans(),
        "gradient_checkpointing": st.booleans(),
        "reduce_bucket_size": st.sampled_from([None, 5 * 10**7]),
        "fp32_accumulation": st.booleans(),
    }
    return st.builds(TrainingSetup, **{name: choice for name, choice in choices.items() if name not in fixed}, **fixed)


models = st.sampled_from(sorted(MODELS)).map(lambda family: profile_of(family, MODELS[family]))


@settings(max_examples=examples(150), deadline=None)
@given(models, setups())
def test_more_gpus_never_need_more_memory_each(profile, setup):
    more = peak_memory(profile, replace(setup, world_size=2 * setup.world_size), NODE)
    assert more.gpu <= peak_memory(profile, setup, NODE).gpu


@settings(max_examples=examples(150), deadline=None)
@given(models, setups())
def test_checkpointing_never_needs_more(profile, setup):
    """But for one layer's input, which is there beside what the layer keeps when it has been computed again."""
    kept = peak_memory(profile, replace(setup, gradient_checkpointing=False), NODE).gpu
    again = peak_memory(profile, replace(setup, gradient_checkpointing=True), NODE).gpu
    one = profile.layers[0].checkpoint_bytes * setup.sequences_per_pass * setup.sequence_length
    assert again <= kept + (1 + COUNTS.fragmentation) * one + 1


@settings(max_examples=examples(150), deadline=None)
@given(st.sampled_from(["llama3", "qwen3", "mistral"]), st.sampled_from([4, 16, 64]), setups())
def test_adapters_never_need_more_than_full_training(family, rank, setup):
    lora = Lora(rank=rank)
    profile = profile_of(family, MODELS[family], lora)
    full = peak_memory(profile, setup, NODE)
    assert peak_memory(profile, replace(setup, lora=lora), NODE).gpu <= full.gpu


@settings(max_examples=examples(100), deadline=None)
@given(models, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_all_ranks_together_hold_the_model(profile, pipeline, ranks):
    setup = TrainingSetup(
        pipeline * ranks, layout=Layout(pipeline=pipeline), zero_stage=3, gradient_accumulation_steps=8
    )
    stages = stage_shards(profile, setup)
    again = profile.vocab_size * profile.hidden_size if profile.tied_embeddings and pipeline > 1 else 0
    assert sum(part.parameters for part in stages) == profile.parameters + again
    held = [of_stage(part, setup, "backward") for part in stages]
    assert ranks * sum(sum(vars(one).values()) for one in held) == pytest.approx(16 * (profile.parameters + again))


@settings(max_examples=examples(100), deadline=None)
@given(models, setups(sequence_length=st.sampled_from([4096, 32768])))
def test_nothing_is_negative_and_batches_add_up(profile, setup):
    found = peak_memory(profile, setup, NODE)
    assert all(value >= 0 for components in found.moments.values() for value in components.values())
    twice = peak_memory(profile, replace(setup, micro_batch_size=2 * setup.micro_batch_size), NODE)
    one, two = found.moments["loss"], twice.moments["loss"]
    assert two["logits"] == pytest.approx(2 * one["logits"], rel=1e-3)
    assert two["activations"] == pytest.approx(2 * one["activations"], rel=1e-3)


def test_the_first_stage_of_a_pipeline_waits_for_the_others():
    profile = profile_of("llama3", "8b")
    setup = TrainingSetup(
        4, layout=Layout(pipeline=4), zero_stage=1, gradient_accumulation_steps=16, fp32_accumulation=True
    )
    assert [shard.micro_batches_in_flight for shard in stage_shards(profile, setup)] == [4, 3, 3, 1]
    assert [
        shard.micro_batches_in_flight for shard in stage_shards(profile, replace(setup, gradient_accumulation_steps=2))
    ] == [2, 2, 2, 1]


def test_parallel_ranks_divide_what_they_split():
    profile = profile_of("llama3", "8b")
    alone = TrainingSetup(8, zero_stage=1, sequence_length=8192, packing=False)
    worst = peak_memory(profile, alone, NODE).moments
    for layout in (Layout(tensor=8), Layout(sequence=8)):
        shared = peak_memory(profile, replace(alone, layout=layout), NODE).moments
        assert shared["backward"]["activations"] < worst["backward"]["activations"]
    tensor = peak_memory(profile, replace(alone, layout=Layout(tensor=8)), NODE).moments["loss"]
    assert tensor["parameters"] < worst["loss"]["parameters"] / 4
    assert replace(alone, layout=Layout(sequence=4)).zero_ranks == 8, "sequence ranks hold the same weights"
    assert replace(alone, layout=Layout(tensor=4)).zero_ranks == 2


def test_offloaded_weights_take_no_gpu_memory():
    setup = TrainingSetup(8, zero_stage=3, offload_optimizer="cpu", offload_parameters="cpu")
    shard = stage_shards(profile_of("llama3", "8b"), setup)[0]
    assert held_bytes(shard, setup, "forward")["parameters"] == 0
    assert held_bytes(shard, replace(setup, lora=Lora()), "forward")["parameters"] == 0


@pytest.mark.parametrize(("window", "masked"), [(1024, True), (1025, False), (None, False)])
def test_a_window_masks_sequences_of_its_length(window, masked):
    """Sequences that are shorter than the window need no mask, and transformers makes none."""
    kind = replace(profile_of("llama3", "8b").layer_kinds[0], window=window)
    assert is_masked(kind, TrainingSetup(1, sequence_length=1024, attention="sdpa", packing=False)) == masked


def test_experts_are_distributed_before_they_reach_a_gpu():
    loading = {
        ranks: planned("qwen3_moe-30b-a3b", "expert", 8, layout=Layout(expert=ranks)).moments["loading"]
        for ranks in (1, 8)
    }
    mixture = profile_of("qwen3_moe", "30b-a3b")
    routed = 2 * sum(layer.expert_parameters for layer in mixture.layers)
    saved = loading[1]["parameters"] - loading[8]["parameters"]
    assert saved == pytest.approx(routed * 7 / 8)


def test_zero3_holds_whole_experts_until_the_backward_pass():
    profile = profile_of("qwen3_moe", "30b-a3b")
    whole = 2 * sum(layer.expert_parameters for layer in profile.layers)

    def live(moment, **about):
        setup = TrainingSetup(**{"world_size": 8, "zero_stage": 3, "gradient_checkpointing": False, **about})
        return peak_memory(profile, setup, NODE).moments[moment]["live_parameters"]

    again = live("backward", gradient_checkpointing=True, kept_weights=0)
    assert live("backward", kept_weights=0) == pytest.approx(again + whole)
    assert live("loss", kept_weights=0) == pytest.approx(again + whole)
    assert live("gradients") == pytest.approx(again + whole / 48), "the first layer is the last to be released"
    assert live("backward", world_size=1, kept_weights=0) == 0, "one rank uses its own shards"
    alone = live("backward", world_size=1, kept_weights=0, offload_parameters="cpu")
    assert alone == pytest.approx(again + whole), "which have to come to the GPU"
    assert live("backward", zero_stage=2) == 0


def test_zero3_saves_inputs_that_no_gradient_needs():
    """What tests/workers/saved_inputs.py sees of a real engine."""
    width, inner = 4096, 14336

    def more(**about):
        lora = Lora(rank=8, **about)
        kind = profile_of("llama3", "8b", lora).layer_kinds[0]
        setup = TrainingSetup(8, zero_stage=3, gradient_checkpointing=False, lora=lora)
        tokens = setup.sequences_per_pass * setup.sequence_length
        return (layer_bytes(kind, setup) - layer_bytes(kind, replace(setup, zero_stage=2))) / tokens

    assert more() == more(dropout=0.1, fused=True) == 0
    assert more(dropout=0.1) == 2 * (2 * width + inner)
    assert more(target_modules="q_proj,v_proj") == 2 * (width + inner)


def test_a_bucket_is_copied_flat_where_ranks_share_it():
    """DeepSpeed joins what belongs to several ranks before it reduces it, but no more than is trained."""

    def buckets(ranks, **about):
        setup = TrainingSetup(ranks, zero_stage=2, reduce_bucket_size=5 * 10**8, **about)
        planned = peak_memory(profile_of("llama3", "8b", setup.lora), setup, NODE)
        return planned.moments["backward"]["buckets"]

    assert buckets(8) == buckets(1) * 3 / 2 == 3 * 2 * 5e8
    assert buckets(8, overlap_comm=False) == 2 * 2 * 5e8
    assert buckets(1) < buckets(8, lora=Lora(target_modules="all-linear")) < 1.2 * buckets(1)


def test_each_kind_of_parallelism_has_its_own_process_groups():
    def runtime(*sizes):
        setup = TrainingSetup(8, Layout(*sizes), zero_stage=1)
        return peak_memory(profile_of("llama3", "8b"), setup, NODE).components["runtime"]

    assert runtime(1) < runtime(2) < runtime(2, 2)
    assert runtime(2, 2) - runtime(2) == runtime(2) - runtime(1) == COUNTS.nccl


def test_the_setup_follows_from_the_deepspeed_file():
    recipe = pages.find("llama3-8b", "full_offload")
    file = deepspeed_file.read(ROOT / "configs" / recipe.deepspeed)
    setup = training_setup(recipe, file, 8)
    assert (setup.zero_stage, setup.offload_optimizer, setup.gradient_accumulation_steps) == (3, "cpu", 8)
    assert setup.reduce_bucket_size == 5 * 10**7 and setup.prefetch_bucket_size is None and setup.overlap_comm
    bare = training_setup(recipe, deepspeed_file.parse({"zero_optimization": {"stage": 2}}), 8)
    assert (bare.reduce_bucket_size, bare.overlap_comm, bare.offload_optimizer) == (5 * 10**8, False, "none")
    assert training_setup(pages.find("llama3-8b", "dpo_lora"), file, 8).sequences_per_pass == 2


def test_memory_is_computed_without_torch():
    code = (
        "import sys, time; start = time.perf_counter()\n"
        "from deepspeed_recipes.planning.cost.memory import peak_memory\n"
        "from deepspeed_recipes.planning.model_profile import lookup\n"
        "from deepspeed_recipes.recipe import pages\n"
        "lookup.profile_of(pages.page('llama3').SIZES['8b'].config)\n"
        "assert not {'torch', 'transformers', 'deepspeed'} & set(sys.modules)\n"
        "print(time.perf_counter() - start)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 2


def test_zero_3_reserves_more_beside_its_states():
    profile = profile_of("llama3", "8b")
    stages = {stage: peak_memory(profile, TrainingSetup(8, zero_stage=stage), NODE).moments["loss"] for stage in (2, 3)}
    reserved = {}
    for stage, parts in stages.items():
        allocated = sum(parts.values()) - parts["runtime"] - parts["fragmentation"]
        reserved[stage] = parts["fragmentation"] - COUNTS.fragmentation * allocated
    states = sum(stages[3][part] for part in ("parameters", "gradients", "optimizer"))
    assert reserved[3] - reserved[2] == pytest.approx(COUNTS.fragmentation_sharded * states)


def test_answers_take_keys_and_values_while_they_are_written():
    """2 x 8 heads x 128 x 32 layers x 2 bytes = 128 KiB per token of Llama 3 8B; ZeRO-3 gathers the whole weights."""
    profile = profile_of("llama3", "8b")

    def held(**changes):
        setup = TrainingSetup(8, sequence_length=1024, **changes)
        return peak_memory(profile, setup, NODE).moments

    assert "rollout" not in held()
    assert held(rollout_answers=16)["rollout"]["key_value_cache"] == 16 * 1024 * 128 * 1024
    whole = 2 * profile.parameters * 7 / 8
    assert held(rollout_answers=1)["rollout"]["live_parameters"] == pytest.approx(whole, rel=1e-3)
    assert held(rollout_answers=1, rollout_gathers=False)["rollout"]["live_parameters"] < whole / 10


@pytest.mark.parametrize(("stage", "share"), [(2, 1), (3, 8)])
def test_zero_3_alone_shards_a_frozen_tower_and_a_teacher(stage, share):
    setup = TrainingSetup(world_size=8, zero_stage=stage, teacher_parameters=4000)
    profile = replace(profile_of("llama3", "8b"), tower_parameters=4000)
    held = peak_memory(profile, setup, NODE).components
    assert held["vision_tower"] == held["teacher"] == 2 * 4000 / share
    packed = peak_memory(profile, replace(setup, teacher_quantized=True), NODE).components
    assert packed["teacher"] == NF4 * 4000


def test_selective_checkpointing_recomputes_what_it_does_not_keep():
    setup = TrainingSetup(world_size=1, gradient_checkpointing="selective", attention="sdpa", sequence_length=1024)
    (kind,) = profile_of("qwen3_moe", "30b-a3b").layer_kinds
    experts, attention = 8 * (768 + 768 + 2048), 32 * 128  # gate, up and down of 8 experts; 32 heads
    used = activations._inner_results(kind) + experts + attention
    again = layer_bytes(kind, setup) - 2 * used * 1024
    kept, recomputed = (
        activations.backward_bytes(kind, replace(setup, gradient_checkpointing=how)) for how in (False, "selective")
    )
    assert recomputed - kept == pytest.approx(again, rel=5e-3)  # the router is counted with the experts


def test_nvme_swaps_parameters_through_deepspeeds_buffers():
    defaults = DeepSpeedZeroOffloadParamConfig()
    assert defaults.buffer_count * defaults.buffer_size == COUNTS.swap_buffer


def test_a_reward_needs_no_logits():
    profile = profile_of("llama3", "8b")
    setup = TrainingSetup(world_size=1, sequence_length=1024, scores=True)
    assert activations.loss_bytes(profile, setup) == (COUNTS.last_norm * 1024 * 4096, 0.0)
    assert activations.loss_bytes(profile, replace(setup, scores=False))[0] > 1024 * profile.vocab_size


def test_a_head_that_is_trained_adds_its_gradients_to_the_tiles_of_the_loss():
    profile = replace(profile_of("llama3", "8b"), hidden_size=64, vocab_size=10**8 // 64)
    setup = TrainingSetup(world_size=1, sequence_length=8192, tiled_loss=True)
    frozen, trained = (activations.loss_bytes(profile, replace(setup, lora=each))[0] for each in (Lora(), None))
    tiles = 2 * COUNTS.tile_tokens * COUNTS.tile_columns + (COUNTS.tile_hidden + COUNTS.tile_gradients) * 8192 * 64
    assert frozen == max(tiles, COUNTS.norm_after_tiles * 8192 * 64)
    assert trained == tiles + COUNTS.tile_gradients * 10**8
