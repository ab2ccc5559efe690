"""Answers of the planner that users asked for: each test is one of their questions."""

import re

import pytest

from deepspeed_recipes.commands import plan
from deepspeed_recipes.planning.hardware.cluster import cluster
from deepspeed_recipes.planning.hardware.gpus import DESKTOP_HOST
from deepspeed_recipes.planning.search import model_recipe
from deepspeed_recipes.planning.search.strategies import plan_request, search
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.layout import Layout


def said(capsys, *words, status=0):
    assert plan.main(list(words)) == status
    return " ".join(capsys.readouterr().out.split())


def asked(name, method, gpu, gpus=1, nodes=1, **flags):
    recipe = model_recipe.find(name, method)
    return plan_request(recipe, cluster(gpu, gpus, nodes, **flags), model_recipe.pinned(recipe))


def test_tensor_parallelism_across_nodes_is_named_as_that(capsys):
    words = ("llama2-7b", "--gpu", "H200", "--gpus", "8", "--nodes", "2")
    across = said(capsys, *words, "layout.tensor=16")
    assert "tensor 16 spans nodes, as asked: several all-reduces per layer cross 3,200 Gbit/s links" in across
    assert "tensor 8 stays inside the node" in said(capsys, *words, "layout.tensor=8")


def test_a_larger_batch_is_suggested_where_gpus_outnumber_sequences(capsys):
    assert plan.main(["bloom-176b", "--gpu", "A100-80GB", "--gpus", "8", "--nodes", "48"]) == 1
    assert "What would fit: global_batch_size=384 (" in capsys.readouterr().err
    words = ("deepseek-v3", "--gpu", "H100", "--gpus", "8", "--nodes", "64", "layout.expert=64")
    assert plan.main(list(words)) == 1
    assert re.search(r"deepspeed|global_batch_size|layout.expert=64", capsys.readouterr().err)
    few = said(capsys, "llama3-8b", "--gpu", "H100", "--gpus", "8", "--nodes", "16")
    assert "With global_batch_size=128, a sequence for every GPU," in few


def test_several_nodes_are_compared_with_one(capsys):
    shown = said(capsys, "llama3-8b", "--gpu", "H100", "--gpus", "8", "--nodes", "4")
    share, times = re.search(r"Efficiency: (\d+)% of one node.* 4 nodes are ([\d.]+) times as fast", shown).groups()
    assert 60 < int(share) <= 100 and float(times) == pytest.approx(4 * int(share) / 100, abs=0.05)
    assert "Efficiency" not in said(capsys, "llama3-8b", "--gpu", "H100", "--gpus", "8")


def test_a_gpu_without_a_model_lists_what_fits(answer, capsys):
    found = answer("--gpu", "4090")
    sizes = [found[method]["parameters"] for method in ("full", "lora", "qlora")]
    assert sizes == sorted(sizes) and all(one["gpu_peak_gib"] < 23.65 for one in found.values())
    assert "qlora" in said(capsys, "--gpu", "4090")
    with pytest.raises(UserError, match="name a model first"):
        plan.main(["--gpu", "4090", "--tokens", "1M"])


def test_examples_of_a_length_are_an_amount(answer):
    words = ("llama3-8b", "qlora", "--gpu", "H100")
    tokens, examples = (
        answer(*words, *more)["plans"][0]["hours"]
        for more in (
            ("--tokens", "25M"),
            ("--examples", "50k", "--example-tokens", "500", "epochs=1"),
        )
    )
    assert examples == pytest.approx(tokens, rel=0.15), "short documents attend to less"
    with pytest.raises(UserError, match="give both, such as --examples 50k --example-tokens 500"):
        plan.main([*words, "--examples", "50k"])
    with pytest.raises(UserError, match="--example-tokens few: must be a number above 0"):
        plan.main([*words, "--examples", "50k", "--example-tokens", "few"])


def test_a_desktop_has_64_gib_and_offloading_comes_last():
    request = asked("qwen3-14b", "full", "3090", 2)
    assert request.cluster.host_memory_gib == DESKTOP_HOST
    assert search(request).best is None, "309 GiB of host memory are not there"
    assert cluster("3090", host_memory=256).host_memory_gib == 256 and cluster("H100").host_memory_gib == 0
    for name, method, gpu, gpus in (("qwen3-8b", "grpo", "H100", 1), ("llama3-8b", "qlora", "4090", 1)):
        tiers = [one.tier > 0 for one in search(asked(name, method, gpu, gpus, host_memory=512)).plans]
        assert tiers == sorted(tiers)


def test_adapters_are_not_split_for_less_than_the_error():
    for name, gpu, gpus in (("llama3-8b", "A100-80GB", 8), ("qwen3-14b", "L40S", 4)):
        assert search(asked(name, "lora", gpu, gpus)).best.base.layout == Layout()


def test_plans_that_are_alike_are_one_row(capsys):
    result = search(asked("llama3-8b", "qlora", "4090"))
    first = result.plans[0]
    alike = [one for one in result.plans if one.is_like(first)]
    assert len(alike) > 1 and first.is_like(first)
    rows = said(capsys, "llama3-8b", "qlora", "--gpu", "4090")
    assert "1 zero0, zero1" in rows
    assert "1 zero0 one GPU" in said(capsys, "llama3-8b", "qlora", "--gpu", "4090", "--explain")


def test_dpo_finds_both_of_its_variants():
    with pytest.raises(UserError, match="unknown variant of llama3 'dpo'; did you mean 'dpo_lora' or 'dpo_full'"):
        plan.main(["llama3-8b", "dpo", "--gpu", "H100"])


def test_loading_counts_where_a_run_takes_minutes(capsys):
    words = ("llama3-8b", "lora", "--gpu", "H100", "--tokens")
    short = said(capsys, *words, "10k")
    assert re.search(r"Starting and loading add about \d+ min to the \d+ s of training", short)
    assert "the cheapest known node with enough of them is --gpu gpu_1x_h100_sxm5" in short
    assert re.search(r"zero0, zero1, .* [\d.]+ \d s -", short), "not 0.00 hours"
    assert "Starting and loading" not in said(capsys, *words, "1B")
