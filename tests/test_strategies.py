"""The search: what it may choose, how it chooses, and that it agrees with published guides."""

from dataclasses import replace

import pytest

from deepspeed_recipes.planning import table
from deepspeed_recipes.planning.cost.memory import Memory
from deepspeed_recipes.planning.hardware.cluster import cluster
from deepspeed_recipes.planning.search import forecast, model_recipe, suggestions
from deepspeed_recipes.planning.search.plans import (
    GIB,
    LAST_RESORT,
    SIMPLICITY,
    TIERS,
    is_dominated,
    ranked,
    shortfalls,
)
from deepspeed_recipes.planning.search.reasons import behind, why
from deepspeed_recipes.planning.search.strategies import evaluate, plan_request, search, template
from deepspeed_recipes.recipe import limits, overrides, pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.layout import bubble
from deepspeed_recipes.recipe.recipe import Layout
from deepspeed_recipes.recipe.run_folder import RunFolder, read_json, write_json
from tests import ROOT
from tests.small import with_zero


def asked(name, method="full", gpu="H100", gpus=8, nodes=1, host=1800, nvme=0, fixed=(), **changes):
    recipe = replace(model_recipe.find(name, method), **changes)
    return plan_request(recipe, cluster(gpu, gpus, nodes, host_memory=host, nvme=nvme), fixed)


def like_page(folder, family, size, **changes):
    """Return the recipe for a model of other dimensions than a page's, as for a config.json from anywhere."""
    write_json(folder / "config.json", dict(pages.page(family).SIZES[size].config) | changes)
    return model_recipe.find(str(folder), "full")


# What may be chosen.


@pytest.mark.parametrize(
    "wanted",
    [
        ("gemma3_vision-4b", "lora", "H100", 8, 1),
        ("qwen2_5_vl-3b", "full", "H100", 2, 1),
        ("tiny_vision", "full", "H100", 2, 2),
        ("llama3-8b", "full", "H100", 8, 1),
        ("llama3-8b", "qlora", "RTX 4090", 2, 1),
        ("llama3-70b", "lora", "A100 80GB", 8, 2),
        ("mixtral-8x7b", "full", "H100", 8, 4),
        ("qwen3_5-9b", "full", "H100", 8, 1),
        ("gemma3-27b", "full", "H100", 8, 2),
        ("ministral3-8b", "kto_lora", "H100", 3, 1),
    ],
    ids=lambda wanted: " ".join(map(str, wanted)),
)
def test_every_plan_can_be_launched_and_fits(wanted):
    question = asked(*wanted)
    found = search(question)
    assert found.best
    gpu = question.cluster.gpu.memory_gib
    for plan in found.plans:
        recipe, setup = plan.recipe, plan.setup
        limits.check(recipe, setup.world_size, template(recipe.deepspeed, plan.cluster))
        limits.check_micro_batch(recipe)
        assert plan.fits and not plan.tight and plan.share <= 0.95 and plan.gpu_gib_range[1] <= gpu
        assert recipe.layout.tensor <= question.cluster.gpus_per_node
        assert (
            recipe.global_batch_size
            == setup.data_parallel_size * setup.micro_batch_size * setup.gradient_accumulation_steps
        )
        assert (ROOT / "configs" / recipe.deepspeed).exists()
        # What is typed makes the plan of the page.
        page = pages.find(f"{recipe.family}-{recipe.size}", recipe.variant)
        assert overrides.apply(page, overrides.differences(page, recipe)) == recipe
        # The plan's numbers are those of the recipe as it would be launched.
        again = evaluate(question, recipe)
        assert (again.gpu_gib, again.speed) == (pytest.approx(plan.gpu_gib), pytest.approx(plan.speed))
    for plan in found.tight:
        assert plan.tight and not plan.fits and plan.share <= 0.95 and plan.gpu_gib_range[1] > gpu
        assert not is_dominated(plan, found.plans) and why(question, plan).endswith(f" of {gpu:,.1f}.")
    assert all(plan.shortfalls and not plan.fits and plan.gpu_gib > 0.95 * gpu for plan in found.rejected)


def test_a_micro_batch_that_a_method_refuses_is_not_planned():
    with pytest.raises(UserError, match=r"^micro_batch_size=1: KTO .*use micro_batch_size=2 or more\.$"):
        asked("llama3-8b", "kto_lora", fixed=("micro_batch_size",), micro_batch_size=1)
    small = asked("llama3-8b", "kto_lora", "L4", 1, fixed=("micro_batch_size",), micro_batch_size=8)
    assert not any(way.startswith("micro_batch_size=1") for way in suggestions.suggestions(small))


def test_every_file_of_the_search_exists_once():
    assert len(SIMPLICITY) == len(set(SIMPLICITY)) >= 16
    assert all((ROOT / "configs" / name).exists() for name in SIMPLICITY)


def test_pages_that_are_pinned_to_a_layout_are_costed_as_they_are():
    for variant in ("tensor", "sequence", "pipeline", "three_d"):
        recipe = pages.find("llama3-70b", variant)
        plan = evaluate(plan_request(recipe, cluster("H100", 8, 8)), recipe)
        assert plan.recipe == recipe and plan.setup.layout == recipe.layout and plan.gpu_gib > 0


# How it is chosen.


@pytest.fixture(scope="module")
def plan():
    return search(asked("llama3-8b")).best


def like(plan, speed, deepspeed="zero2.json", **layout):
    """Return a plan of another speed, file and layout."""
    recipe = replace(plan.recipe, deepspeed=deepspeed, layout=Layout(**layout))
    setup = replace(plan.setup, layout=recipe.layout)
    other = replace(plan, base=recipe, setup=setup)
    vars(other)["time"] = replace(plan.time, tokens=plan.time.tokens * speed)
    return other


def test_a_simpler_plan_is_kept_within_five_percent(plan):
    def first(*plans):
        best = ranked(plans)[0].recipe
        return best.deepspeed, best.layout

    fast = like(plan, 1.0, "tensor_parallel.json", tensor=2)
    assert first(fast, like(plan, 0.91, "zero3.json")) == ("zero3.json", Layout())  # a split has to gain twice that
    assert first(fast, like(plan, 0.89, "zero3.json")) == ("tensor_parallel.json", Layout(tensor=2))
    whole = like(plan, 1.0, "zero3_hpz.json")
    assert first(whole, like(plan, 0.96, "zero3.json"))[0] == "zero3.json"
    assert first(whole, like(plan, 0.94, "zero3.json"))[0] == "zero3_hpz.json"
    assert first(like(plan, 1.0, "zero2.json"), like(plan, 0.99, "zero0.json"))[0] == "zero0.json"
    # One kind of split before two; sequences before matrices before layers.
    for simpler, other in (
        ({"sequence": 2}, {"tensor": 2}),
        ({"tensor": 2}, {"pipeline": 2}),
        ({"tensor": 2}, {"tensor": 2, "sequence": 2}),
        ({"tensor": 2}, {"tensor": 4}),
    ):
        assert first(like(plan, 1.0, **other), like(plan, 0.97, **simpler))[1] == Layout(**simpler)


def test_the_order_is_by_speed_apart_from_simplicity(plan):
    plans = [like(plan, speed, tensor=size) for speed, size in ((0.5, 2), (1.0, 4), (0.8, 8))]
    assert [one.recipe.layout.tensor for one in ranked(plans)] == [4, 8, 2]


def test_what_may_run_out_of_memory_is_shown_and_not_recommended():
    """LoRA on one GPU has taken up to 1.22 times the prediction (`ranges` of the constants)."""
    question = asked("llama3-8b", "lora", gpu="RTX 4090", gpus=1, fixed=["deepspeed"], deepspeed="zero2.json")
    found = search(question)
    (tight,) = found.tight
    likely, (_, most), have = tight.gpu_gib, tight.gpu_gib_range, question.cluster.gpu.memory_gib
    assert found.best is None and likely < 0.95 * have < have < most < 1.3 * likely
    said = suggestions.sentence(found)
    assert f"nothing is certain to fit; zero2.json is tight: likely {likely:.1f} GiB, but runs of its kind took" in said
    assert "\nWhat would fit: --method qlora (" in said
    answer = table.as_json(found)
    assert answer["best"] is None and answer["plans"][0]["tight"] and not answer["plans"][0]["fits"]
    # Among all files, one that offloads fits for sure, and the faster ones that are tight stand after it.
    free = search(replace(question, fixed=frozenset()))
    assert free.best.tier > 0 and free.best.gpu_gib_range[1] < have
    assert "zero2.json" in {plan.recipe.deepspeed for plan in free.tight if plan.speed > free.best.speed}
    # A larger micro-batch that is tight is not taken where a smaller one fits.
    room = search(asked("llama3-8b", "lora", gpu="L40S", gpus=1, fixed=["deepspeed"], deepspeed="zero2.json"))
    larger = replace(room.best.recipe, micro_batch_size=2 * room.best.recipe.micro_batch_size)
    assert room.best.fits and not evaluate(question, larger).fits


def test_of_a_gpu_all_counts_and_of_a_node_95_percent():
    hardware = cluster("H100", 8, 1, host_memory=100)

    def with_gpu(share):
        return shortfalls(memory(gpu=share * hardware.gpu.memory_gib), hardware)

    assert with_gpu(0.99) == () and with_gpu(1.01) == ("79.9 GiB of 79.1 on a GPU",)
    assert shortfalls(memory(host=96), hardware) and not shortfalls(memory(host=94), hardware)
    assert not shortfalls(memory(host=96), cluster("H100", 8)), "unknown: not checked"
    assert shortfalls(memory(nvme=1), hardware), "without NVMe there is no room on it"


def memory(gpu=0, host=0, nvme=0):
    """Return a memory of so many GiB."""
    moments = {"step": {"optimizer": gpu * GIB}, "loss": {"activations": gpu * GIB / 2}}
    return Memory(moments, host, nvme, 0.0)


def test_the_best_plan_of_every_tier_is_kept_unless_another_is_as_fast_and_as_lean():
    both = search(asked("llama3-8b", gpu="L40S", gpus=7, nvme=3000)).plans
    assert {plan.tier for plan in both} >= {0, 1} and LAST_RESORT[0] not in {plan.recipe.deepspeed for plan in both}
    for tier in range(1, len(TIERS)):
        assert sum(plan.tier == tier for plan in both) <= 1
    for plan in both:
        others = [one for one in both if one is not plan and one.tier < plan.tier]
        assert plan.tier == 0 or not is_dominated(plan, others)
    # Offload comes last even if it is predicted to be faster and leaner than the only plan without it.
    lean, full = (next(plan for plan in both if plan.tier == tier) for tier in (1, 0))
    assert lean.speed > full.speed and lean.gpu_gib < full.gpu_gib and both[0].tier == 0
    assert is_dominated(replace(full, memory=replace(full.memory, host_gib=lean.memory.host_gib)), [lean])
    assert not is_dominated(lean, [full])


def test_the_table_shows_every_tier(plan):
    fast = [like(plan, 1.0, tensor=size) for size in range(2, 2 + table.SHOWN)]
    slow = [like(plan, 0.1, name) for name in ("zero2_offload.json", "zero3_offload.json", "zero3_nvme.json")]
    assert [one.recipe.deepspeed for one in table.shown([*fast, *slow])[table.SHOWN :]] == [
        "zero2_offload.json",
        "zero3_nvme.json",
    ]


def test_offload_comes_last():
    small, large = search(asked("llama3-8b")), search(asked("llama3-8b", gpu="RTX 4090", gpus=1))
    assert small.best.setup.offload_optimizer == "none"
    assert large.best.setup.offload_optimizer == "cpu" and large.best.recipe.deepspeed in TIERS[1] + TIERS[2]
    no_host = search(asked("llama3-8b", gpu="RTX 4090", gpus=1, host=16))
    assert no_host.best is None or no_host.best.setup.offload_optimizer != "cpu"


def test_checkpointing_and_micro_batch_follow_from_free_memory():
    room = search(asked("llama3-1b", gpu="H200", fixed=["deepspeed"], deepspeed="zero2.json")).best
    none = search(asked("llama3-8b", gpu="A100 40GB", fixed=["deepspeed"], deepspeed="zero3.json")).best
    assert not room.recipe.gradient_checkpointing and none.recipe.gradient_checkpointing
    assert room.speed > none.speed


def test_a_global_batch_that_ranks_cannot_divide_is_raised():
    assert search(asked("llama3-8b", "lora", gpus=6)).best.recipe.global_batch_size == 66
    kept = asked("llama3-8b", "lora", gpus=6, fixed=["global_batch_size"])
    for plan in search(kept).plans:
        assert plan.recipe.global_batch_size == 64 and 64 % plan.setup.data_parallel_size == 0


# What the field's guides say (each is asked as a person would ask it).


def test_thirteen_billion_on_eight_80gb(tmp_path):
    """Llama 2 13B, full: ZeRO-3 on 8 A100 80GB is the field's answer; with less sharding it does not fit."""
    sizes = {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "vocab_size": 32000}
    recipe = like_page(tmp_path, "llama3", "8b", **sizes, num_attention_heads=40, num_key_value_heads=40)
    assert recipe.model.parameters == 13_015_864_320
    found = search(plan_request(recipe, cluster("A100 80GB", 8)))
    assert found.best.setup.zero_stage in (2, 3) and found.best.recipe.layout == Layout()
    assert "zero0.json" in {plan.recipe.deepspeed for plan in found.rejected}


def test_seventy_billion_with_adapters_on_eight_80gb():
    found = search(asked("llama3-70b", "lora", gpu="A100 80GB"))
    assert found.best.setup.offload_optimizer == "none" and found.best.share < 0.95
    assert {"zero0.json", "zero1.json", "zero2.json"} & {plan.recipe.deepspeed for plan in found.rejected}
    assert search(asked("llama3-70b", "full", gpu="A100 80GB", host=0)).best.setup.offload_optimizer == "cpu"


def test_eight_billion_on_one_24gb_gpu_is_qlora():
    for method, fits in (("full", False), ("qlora", True)):
        question = asked("llama3-8b", method, gpu="RTX 4090", gpus=1, host=64)
        best = search(question).best
        assert bool(best and best.setup.offload_optimizer == "none") == fits, method
    lora = asked("llama3-8b", "full", gpu="RTX 4090", gpus=1, host=32)
    assert "--method" in suggestions.sentence(search(lora))


def test_eight_billion_with_all_states_do_not_fit_on_one_h200(tmp_path):
    """16 bytes each are 120 of its 140 GiB, and what ZeRO-3 reserves beside them is more than the rest."""
    question = asked("llama3-8b", gpu="H200", gpus=1)
    best = search(question).best
    assert best.setup.offload_optimizer == "cpu"
    small = replace(best.recipe, deepspeed="zero3.json")
    default = replace(best.recipe, deepspeed=with_zero(tmp_path, "zero3.json", sub_group_size=10**9))
    one, large = evaluate(question, small), evaluate(question, default)
    assert not one.fits and not large.fits
    assert large.memory.gpu >= one.memory.gpu > 140 * GIB


def test_a_trillion_parameters_need_nvme(tmp_path):
    """On one node of 16 GPUs, as ZeRO-Infinity (arXiv:2104.07857) fine-tuned 1T: 12 x 128 x 25,600^2 weights."""
    sizes = {"hidden_size": 25600, "intermediate_size": 102400, "num_hidden_layers": 128, "num_attention_heads": 256}
    recipe = replace(like_page(tmp_path, "gpt_neox", "20b", **sizes), sequence_length=1024)
    assert recipe.model.parameters == pytest.approx(12 * 128 * 25600**2, rel=0.01)
    question = plan_request(recipe, cluster("A100 80GB", 16, host_memory=2100, nvme=28000))
    best = search(question).best
    assert best.recipe.deepspeed == "zero3_nvme.json" and 12e12 / GIB < best.memory.nvme_gib < 28000
    without = replace(question, cluster=replace(question.cluster, nvme_gib=0))
    found = search(without)
    assert found.best is None and "--nvme" in suggestions.sentence(found)


def test_seventy_billion_at_32k_on_512_gpus():
    """The guides' layout where networks are slow: matrices inside the node, layers and context across.

    With a 400 Gbit/s card per GPU, ZeRO-3 hides its gathers behind sequences of that length, and it is enough to split
    them over the GPUs of a node.
    """
    question = asked("llama3-70b", nodes=64, sequence_length=32768)
    fast = search(question).best
    assert fast.setup.zero_stage == 3 and fast.recipe.layout == Layout(sequence=8)
    # A pipeline keeps packed documents apart with a mask of all pairs: for whole documents only is it the fastest.
    whole_documents = replace(question.recipe, packing=False)
    slow = replace(question, recipe=whole_documents, cluster=replace(question.cluster, network_gbs=50))
    found = search(slow)
    best = next(plan for plan in found.plans if plan.recipe.layout.pipeline > 1 and plan.recipe.layout.tensor > 1)
    # A simpler layout may be hardly slower; half as many stages are faster still, only tightly.
    layout = best.recipe.layout
    fewer = evaluate(slow, replace(best.recipe, layout=replace(layout, pipeline=layout.pipeline // 2)))
    fastest = max(plan.speed for plan in (best, fewer) if plan.fits or plan.tight)
    assert fastest >= found.best.speed
    assert best.recipe.layout.tensor <= 8 and best.recipe.layout.sequence > 1
    # Half as many ranks per sequence would fit too, only tightly or slower.
    half = replace(best.recipe, layout=replace(best.recipe.layout, sequence=best.recipe.layout.sequence // 2))
    assert not (other := evaluate(slow, half)).fits or other.speed < best.speed
    reasons = why(slow, best).lower()
    assert f"tensor {best.recipe.layout.tensor} stays inside the node because its all-reduces run per layer" in reasons
    assert f"pipeline {best.recipe.layout.pipeline} goes across nodes because only activations pass" in reasons
    whole = replace(question.recipe, deepspeed="pipeline.json", layout=Layout(8, 4, 4))
    assert evaluate(question, whole).fits and not evaluate(question, replace(whole, layout=Layout(8, 1, 1))).fits
    # What a split gains is lost on a slow network that it has to cross.
    slower = replace(slow, cluster=replace(slow.cluster, network_gbs=25))
    assert evaluate(slower, whole).speed < 0.6 * evaluate(question, whole).speed


def test_a_pipeline_of_four_with_sixteen_micro_batches_waits_three_nineteenths():
    assert bubble(4, 16) == pytest.approx(3 / 19)
    question = asked("llama3-70b", nodes=8, fixed=["layout.pipeline", "micro_batch_size"], layout=Layout(pipeline=4))
    recipe = replace(question.recipe, deepspeed="pipeline.json", layout=Layout(8, 4), global_batch_size=32)
    plan = evaluate(question, recipe)
    assert plan.setup.gradient_accumulation_steps == 16
    assert "wait 16% of the time with 16 micro-batches" in why(question, plan)
    assert plan.time.components["bubble"] / (
        plan.time.seconds - plan.time.components["optimizer"] - plan.time.components["zero"]
    ) == pytest.approx(3 / 19, rel=0.01)


# What is said.


def test_each_reason_names_the_number_that_decided(plan):
    question = asked("llama3-70b", "lora", nodes=2)
    best = search(question).best
    assert best.setup.zero_stage == 3 and "unsharded a GPU would need" in why(question, best)
    long = asked("llama3-8b", sequence_length=131072)
    found = search(long).best
    size = found.recipe.layout.sequence
    fewer = "on one GPU" if size == 2 else f"over {size // 2} GPUs"
    assert f"sequence {size} because {fewer} a sequence of 131,072 tokens would need up to" in why(long, found)
    miss = search(asked("llama3-70b")).rejected[0]
    assert why(question, miss).startswith("Does not fit: ")


def test_sequences_are_split_for_the_reason_that_is_given():
    """Too few of them is said only where they are fewer than the ranks that would each take one."""
    old = asked("llama3-8b", "lora", gpu="V100 32GB", gpus=8)
    assert search(old).best.recipe.layout == Layout(), "adapters are not split for a gain below the error"
    few = asked("llama3-8b", gpus=8, global_batch_size=4, sequence_length=8192)
    split = {plan.recipe.layout: why(few, plan) for plan in search(few).plans}
    assert "sequence 2 because 4 sequences per step are too few for all GPUs without it" in split[Layout(sequence=2)]
    assert not any("too few" in said for layout, said in split.items() if layout != Layout(sequence=2))


def test_a_plan_behind_the_first_is_compared_in_speed(plan):
    slow, fast = like(plan, 0.9), like(plan, 1.0, "zero3_offload.json")
    assert behind(fast, slow) == "11% faster than the first, but it offloads"
    assert behind(like(plan, 0.995), plan) == "as fast as the first within 1 %, but it is less simple"
    assert behind(slow, plan).startswith("11% more time per token, mainly +")
    (note,) = table.faster([slow, like(slow, 2.0, "zero3_offload.json")])
    assert note.startswith("Plan 2 is predicted to be 2 times as fast. Plans that offload come last, since")
    assert not list(table.faster([slow, like(plan, 0.94)]))
    (note,) = table.faster([slow, like(plan, 0.94), like(plan, 1.08)])
    assert note.startswith("Plan 3 is predicted to be 1.2 times as fast. The simpler one comes first where speeds are")


# What the launcher asks.


@pytest.fixture
def one_gpu():
    return cluster("A100 40GB", 1, host_memory=200)


def test_a_run_that_cannot_fit_is_stopped_with_what_fits(one_gpu):
    recipe = pages.find("llama3-8b", "lora")
    plan = forecast.forecast(recipe, one_gpu)
    assert plan.fits and forecast.line(plan).startswith("forecast: ")
    greedy = replace(recipe, micro_batch_size=64, gradient_checkpointing=False)
    with pytest.raises(UserError, match=r"this run needs .* on a GPU\.\nWhat fits: .*micro_batch_size=\d+"):
        forecast.forecast(greedy, one_gpu)
    with pytest.raises(UserError, match=r"\nnothing fits; .*\nWhat would fit: --method lora \(.*--no-plan"):
        forecast.forecast(pages.find("llama3-8b", "full"), replace(one_gpu, host_memory_gib=32))


def test_a_file_of_configs_is_not_named_as_a_change(one_gpu):
    recipe = replace(pages.find("llama3-8b", "lora"), deepspeed=str(ROOT / "configs" / "zero2.json"))
    greedy = replace(recipe, micro_batch_size=64)
    with pytest.raises(UserError) as error:
        forecast.forecast(greedy, one_gpu)
    assert str(ROOT) not in str(error.value)


def test_what_cannot_be_planned_is_not_refused(one_gpu):
    recipe = pages.find("llama3-70b", "full")
    assert forecast.forecast(replace(recipe, draft=replace(recipe.draft, enabled=True)), one_gpu) is None
    for config in ({}, {"model_type": "of_its_own_code", "hidden_size": 64}):
        assert forecast.forecast(replace(recipe, model=replace(recipe.model, config=config)), one_gpu) is None


def test_auto_keeps_what_the_user_has_set(one_gpu):
    recipe = replace(pages.find("llama3-8b", "lora"), sequence_length=1024)
    free = forecast.choose(recipe, ["deepspeed"], one_gpu)
    held = forecast.choose(replace(recipe, micro_batch_size=1), ["deepspeed", "micro_batch_size"], one_gpu)
    assert free.micro_batch_size > 1 and held.micro_batch_size == 1
    with pytest.raises(UserError, match=r"deepspeed=auto: nothing fits; .*\nWhat would fit: --method"):
        forecast.choose(pages.find("llama3-8b", "full"), [], replace(one_gpu, host_memory_gib=32))


def test_the_summary_holds_what_was_predicted_and_what_happened(tmp_path, one_gpu):
    run = RunFolder(tmp_path)
    forecast.compare(run, None)
    assert not run.summary.exists()
    write_json(run.summary, {"stopped": True, "steps": 3})
    forecast.compare(run, None)
    assert read_json(run.summary) == {"stopped": True, "steps": 3}
    write_json(run.summary, {"stopped": False, "tokens_per_second": 90.0})
    forecast.compare(run, None)
    unknown = {"gpu_allocated_gib": None, "gpu_reserved_gib": None}
    assert read_json(run.summary)["predicted"] == {**unknown, "tokens_per_second": None}
    assert read_json(run.summary)["measured"] == {**unknown, "tokens_per_second": 90.0}
    plan = forecast.forecast(pages.find("llama3-8b", "lora"), one_gpu)
    seen = {"gpu_peak_gib": 30.0, "gpu_reserved_gib": 31.0, "tokens_per_second": 90.0}
    write_json(run.summary, {"stopped": False, **seen})
    forecast.compare(run, plan)
    predicted, measured = read_json(run.summary)["predicted"], read_json(run.summary)["measured"]
    assert list(measured.values()) == list(seen.values())
    inside = [size for part, size in plan.components.items() if part not in ("runtime", "fragmentation")]
    assert predicted["gpu_allocated_gib"] == pytest.approx(sum(inside))
    assert predicted["gpu_allocated_gib"] < predicted["gpu_reserved_gib"] < plan.gpu_gib
    assert predicted["tokens_per_second"] == pytest.approx(plan.speed)
