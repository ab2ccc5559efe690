"""What people ask the planner: how long, for how much, on what, how many, how long a sequence."""

import argparse
import io
import json
import re
import shlex
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache

import pytest
from datasets import Dataset
from pyarrow import Table, parquet
from tokenizers import Tokenizer

from deepspeed_recipes.commands import main, plan
from deepspeed_recipes.commands.plan import workload
from deepspeed_recipes.planning.hardware.cluster import Cluster, cluster
from deepspeed_recipes.planning.hardware.gpus import DESKTOP
from deepspeed_recipes.planning.hardware.instances import INSTANCES, prices
from deepspeed_recipes.planning.search import extremes, model_recipe
from deepspeed_recipes.planning.search.plans import Workload
from deepspeed_recipes.planning.search.strategies import plan_request, search
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.project import SAMPLES
from deepspeed_recipes.recipe.samples import TINY_MODEL
from deepspeed_recipes.training.data import updates
from tests import ROOT

EIGHT = ("--gpu", "p5.48xlarge")


def asked(name, method="full", gpu="H100", gpus=8, **flags):
    return plan_request(model_recipe.find(name, method), cluster(gpu, gpus, **flags))


@cache
def screen(*words):
    """Return what the planner prints for a command, which is run once for all tests."""
    with redirect_stdout(io.StringIO()) as printed:
        assert plan.main(words) in (0, 1)
    return printed.getvalue()


# The questions in scripts/README.md.

QUESTIONS = re.findall(
    r"^\d+\. (.+\?)\n +`python scripts/plan.py (.+)`$",
    (ROOT / "scripts" / "README.md")
    .read_text(encoding="utf-8")
    .split("<!-- questions -->")[1]
    .split("<!-- end -->")[0],
    re.MULTILINE,
)
SAID = (
    "llama3-8b (meta-llama/Llama-3.1-8B-Instruct, 8.03B), qlora",
    "GPU with 8 GiB (assumed to be as fast as RTX 4060)",
    "Dollars: 1.86 per hour of the node, on demand, 2026-09",
    "Dollars: 2.50 per hour of the node, as given.",
    "cheapest",
    "Hours are for training 10,000,000,000 tokens",
    "The longest sequence that fits has",
    "dpo_lora",
    "smallest",
    "V100 16GB has no bf16",
)
"""What the answer to each must say."""


def test_there_are_ten_questions():
    assert len(QUESTIONS) == len(SAID) == 10


@pytest.mark.parametrize(
    ("question", "command", "said"), [(*one, said) for one, said in zip(QUESTIONS, SAID, strict=True)]
)
def test_a_question_is_answered(question, command, said, capsys):
    assert plan.main(shlex.split(command)) == 0, capsys.readouterr().err
    assert said in capsys.readouterr().out


# Hours and dollars.


def test_hours_and_dollars_follow_from_speed_and_price(answer):
    two = answer("llama3-8b", *EIGHT, "--nodes", "2", "--tokens", "1.5B", "--price", "30")
    for one in two["plans"]:
        speed = 16 * one["tokens_per_second_per_gpu"]
        assert one["hours"] == pytest.approx(1.5e9 / speed / 3600)
        assert one["dollars"] == pytest.approx(one["hours"] * 2 * 30)
    listed = answer("llama3-8b", *EIGHT, "--tokens", "1e9")["plans"][0]
    assert listed["dollars"] == pytest.approx(listed["hours"] * INSTANCES["p5.48xlarge"].dollars)
    unknown = answer("llama3-8b", "--gpu", "H100", "--gpus", "8", "--tokens", "1e9")["plans"][0]
    assert unknown["hours"] == pytest.approx(listed["hours"], rel=0.2) and unknown["dollars"] is None
    assert "hours" not in answer("llama3-8b", *EIGHT)["plans"][0], "nobody has said how much"


def test_steps_and_data_say_how_much_too(answer, tmp_path):
    steps = answer("llama3-8b", *EIGHT, "max_steps=10")["plans"][0]
    assert steps["hours"] == pytest.approx(10 * steps["step_seconds"] / 3600)
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": "word" * 500}) + "\n" for _ in range(20)))
    words = ("llama3-8b", "--method", "pretrain", *EIGHT, f"data.path={file}")
    once, thrice = (answer(*words, f"epochs={epochs}")["plans"][0] for epochs in (1, 3))
    assert once["hours"] == pytest.approx(20 * 500 / (8 * once["tokens_per_second_per_gpu"]) / 3600)
    assert thrice["hours"] == pytest.approx(3 * once["hours"])
    fifth = answer(*words, "epochs=1", "data.max_examples=4")["plans"][0]
    assert fifth["hours"] == pytest.approx(once["hours"] / 5)


def test_what_another_method_reaches_is_what_its_own_plan_says(answer):
    """All weights of 8B on two nodes of A100 40GB: a pipeline is 3.5 times as fast as ZeRO-3 without one."""
    nodes = ("--gpu", "A100-40GB", "--gpus", "4", "--nodes", "2")
    best = answer("granite-8b", "full", *nodes)["plans"][0]
    reached = f"--method full: {best['tokens_per_second_per_gpu']:,.0f}, {best['gpu_peak_gib']:.1f} GiB"
    assert reached in screen("granite-8b", "lora", *nodes)


@pytest.mark.parametrize(
    ("variant", "sample", "times", "sequences"),
    [
        ("dpo_lora", "preferences", 1, 1900),
        ("kto_lora", "judged", 2, 1900),
        ("lora", "extract", 1, 5700),
        ("grpo", "extract", 8, 8 * 5700),
    ],
)
def test_unpacked_examples_are_counted_as_the_run_counts_them(variant, sample, times, sequences):
    """By their tokens in full sequences, a run of 120 steps would have 4; 5 % of the examples are held out."""
    page = model_recipe.find("llama3-8b", variant)
    data = replace(page.data, path=str(SAMPLES / sample / "train.jsonl"), validation=None, validation_share="auto")
    recipe = replace(page, data=data, epochs=2.0, packing=False)
    best = search(plan_request(recipe, cluster("H100", 8))).best
    flags = {"price": [], "examples": None, "example_tokens": None, "tokens": None}
    work = workload.workload(argparse.Namespace(**flags), recipe, {"data.path"})
    assert work.tokens == pytest.approx(2 * times * workload.tokens_of(recipe)[0])
    assert work.steps(best) == updates.in_all(recipe, sequences)
    flags |= {"examples": "1k", "example_tokens": "100"}
    work = workload.workload(argparse.Namespace(**flags), recipe, set())
    assert work.tokens == 2 * times * 100_000
    assert work.steps(best) == updates.in_all(recipe, 8000 if variant == "grpo" else 1000)


def test_short_documents_in_long_sequences_attend_to_less(answer, tmp_path, capsys):
    """Tokens count alike: of one document of 30,000 characters and 300 of 100, half are in the long one."""
    file = tmp_path / "mixed.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["a" * 30000, *["b" * 100] * 300]))
    recipe = replace(model_recipe.find("llama3-8b", "pretrain"), sequence_length=32768)
    recipe = replace(recipe, data=replace(recipe.data, path=str(file)))
    assert workload.tokens_of(recipe) == pytest.approx((15000, (30000 + 100) / 2 / 4))
    divided = replace(recipe, sequence_length=1024)
    assert workload.tokens_of(divided) == pytest.approx((15000, (4096 + 100) / 2 / 4))
    words = ("llama3-8b", "--method", "pretrain", *EIGHT, "sequence_length=32768")
    slow = answer(*words, "--tokens", "1M")["plans"][0]["tokens_per_second_per_gpu"]
    fast = answer(*words, f"data.path={file}", "epochs=1")["plans"][0]["tokens_per_second_per_gpu"]
    assert 1.1 < fast / slow < 3


def test_sources_with_weights_are_drawn_from_until_each_has_been_read(tmp_path):
    """With 9 of 10 from `a`, reading the 100 examples of `b` once takes 1,000 draws, so 900 from the 100 of `a`."""
    page = model_recipe.find("tiny", "pretrain")
    for name, length in (("a", 40), ("b", 400)):
        (tmp_path / f"{name}.jsonl").write_text((json.dumps({"text": name * length}) + "\n") * 100)
    data = replace(page.data, path=f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl", weights="9,1", validation_share=0.0)
    elsewhere = replace(page, data=data, model=replace(page.model, path="owner/name"))  # 4 characters per token
    assert workload.tokens_of(elsewhere)[0] == pytest.approx(900 * 10 + 100 * 100)
    size = workload.size_of(elsewhere)
    assert (size.examples, size.documents, size.tokens) == (1000, 1000, 19000)
    once = replace(elsewhere, data=replace(data, weights=None))
    assert workload.tokens_of(once)[0] == pytest.approx(100 * 10 + 100 * 100)


def test_a_pair_of_answers_reads_its_prompt_twice():
    recipe = model_recipe.find("tiny", "dpo_lora")
    lines = (SAMPLES / "preferences" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    pairs = [json.loads(line) for line in lines]
    reader = Tokenizer.from_file(f"{TINY_MODEL}/tokenizer.json")
    read = [
        turn["content"] for pair in pairs for key in ("prompt", "prompt", "chosen", "rejected") for turn in pair[key]
    ]
    known = sum(len(one.ids) for one in reader.encode_batch(read)) + workload.TEMPLATE * len(read)
    assert workload.tokens_of(recipe)[0] == pytest.approx(known, rel=0.05)
    elsewhere = replace(recipe, model=replace(recipe.model, path="owner/name"))  # 4 characters of English per token
    about = sum(map(len, read)) / workload.CHARACTERS + workload.TEMPLATE * len(read)
    assert workload.tokens_of(elsewhere)[0] == pytest.approx(about, rel=0.01)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("2e9", 2e9), ("500M", 5e8), ("1.5b", 1.5e9), ("10_000_000", 1e7), ("1,000", 1000), ("3T", 3e12)],
)
def test_tokens_are_written_in_many_ways(text, tokens):
    assert workload.tokens(text) == tokens


@pytest.mark.parametrize(("text", "hours"), [("8h", 8), ("90m", 1.5), ("2d", 48), ("1d12h", 36), ("0.5h", 0.5)])
def test_a_deadline_has_a_unit(text, hours):
    assert workload.deadline(text) == pytest.approx(hours)


def test_every_price_is_of_an_instance_and_dated():
    dated = [one for one in INSTANCES.values() if one.dollars]
    assert len(dated) == 54 and all(re.fullmatch(r"2026-\d\d", one.date) and one.dollars > 0 for one in dated)
    assert INSTANCES["gpu_8x_h100_sxm5"].dollars == 31.92, "3.99 per GPU: lambda.ai/instances, 2026-09-20"
    given = prices(["p5.48xlarge=$30", "standard_nd96isr_h100_v5=40 USD"])
    assert given.of_node("p5.48xlarge") == 30 and given.of_node("ND96isr_H100_v5") == 40
    assert given.of_node("p4d.24xlarge") == INSTANCES["p4d.24xlarge"].dollars
    assert given.of_node("") is None


# A deadline.


def test_a_deadline_takes_the_fewest_nodes(answer):
    words = ("llama3-8b", *EIGHT, "--tokens", "40B")
    found = answer(*words, "--deadline", "24h")
    nodes = found["hardware"]["nodes"]
    assert nodes > 2 and found["plans"][0]["hours"] <= 24
    assert answer(*words, "--nodes", str(nodes - 1))["plans"][0]["hours"] > 24


def test_a_bare_gpu_fills_a_node_first(answer):
    found = answer("llama3-8b", "--method", "lora", "--gpu", "H100", "--tokens", "200M", "--deadline", "2h")
    assert (found["hardware"]["gpus_per_node"], found["hardware"]["nodes"]) in {(2, 1), (4, 1), (8, 1)}


def test_gpus_of_a_node_that_are_given_stay(answer):
    words = ("llama3-8b", "--gpu", "H100", "--gpus", "4", "--tokens", "2B", "--deadline", "8h")
    found = answer(*words)["hardware"]
    assert found["gpus_per_node"] == 4 and found["nodes"] > 1
    assert answer(*[word for word in words if word not in ("--gpus", "4")])["hardware"]["gpus_per_node"] == 8


@pytest.mark.parametrize("room", [1.01, 4.0])
def test_a_deadline_is_answered_with_its_range(room, answer, printed_by):
    words = ("llama3-8b", "--gpu", "p5.48xlarge", "--tokens", "2B")
    (taken, slowest) = (
        2e9 / (8 * speed) / 3600
        for one in answer(*words)["plans"][:1]
        for speed in (one["tokens_per_second_per_gpu"], one["tokens_per_second_per_gpu_range"][0])
    )
    said = printed_by("plan", *words, "--deadline", f"{room * taken:.3f}h")
    assert f"The fewest GPUs that finish within {room * taken:.1f} h: 8 GPUs (1 x 8), in {taken:.1f} h" in said
    assert (f"but up to {slowest:.1f} h within the range" in said) == (room == 1.01)


# Notes on a plan.


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("llama3-8b", *EIGHT), "full, 64 sequences of 4,096 tokens per step, on 8 x H100"),
        (("llama3-8b", "dpo_lora", *EIGHT), " examples of 2 x 2,048 tokens per step"),
        (("llama3-8b", "--gpu", "H100", "--gpus", "3"), "global_batch_size was raised from 64 to 66, so that"),
        (("qwen3-0.6b", "grpo", "--gpu", "H100", "--gpus", "3"), "global_batch_size was raised from 64 to 72, so that"),
        (
            ("qwen3-8b", "--gpu", "4090", "--host-memory", "0"),
            "171 GiB of host memory per node, which was not checked: give --host-memory.",
        ),
        (("llama3-8b", "grpo", "--gpu", "A100-80GB"), "Speeds are for training only"),
        (
            ("qwen3-8b", "--gpu", "4090", "--host-memory", "0"),
            "Other methods with this batch, in tokens/s/GPU and memory: --method lora: ",
        ),
        (
            ("llama3-405b", *EIGHT, "--nodes", "8", "layout.tensor=8", "layout.pipeline=8", "--explain"),
            "Most of it: ",
        ),
        (
            ("qwen3-4b", "lora", "--gpu", "g6e.12xlarge", "--gpus", "2", "--tokens", "9M"),
            "Dollars: 10.49 per hour of the node, 5.25 per GPU, on demand",
        ),
        (
            ("qwen3-4b", "lora", "--gpu", "g6e.12xlarge", "--gpus", "2", "--tokens", "9M"),
            "g6e.12xlarge has 2 more GPUs, idle but paid for.",
        ),
        (
            ("qwen3-4b", "lora", "--gpu", "T4", "--tokens", "9M"),
            "the cheapest known node with enough of them is --gpu g4dn.xlarge",
        ),
        (("qwen3-4b", "lora", "--gpu", "H100", "--tokens", "100M"), " steps; loading"),
        (("qwen3-4b", "dpo_lora", "--gpu", "H100", "--tokens", "1M"), " steps if all sequences are full; loading, pad"),
        (
            ("Qwen3-4B", "lora", "--gpu", "H100", "--tokens", "1M"),
            "sequences are too few to learn much from",
        ),
        (("qwen3-8b", "lora", "--gpu", "T4"), "--method full: 3"),
        (("qwen3-4b", "lora", "--gpu", "H100", "--tokens", "1M"), " min  "),
        (("qwen3-14b", "--which-gpu"), "This assumes a billion tokens; to change that, give --tokens"),
        (("qwen3-14b", "--which-gpu", "--tokens", "20M"), "--tokens 20M"),
        (("qwen3-14b", "--which-gpu"), "1 x p6-b200.48xlarge (8 x B200)"),
        (("llama3-8b", "--gpu", "4090", "--host-memory", "64G", "--sequence-length", "2k"), "of 2,048 tokens per step"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_an_answer_says_what_it_takes_for_granted(words, said):
    assert said in screen(*words)


def test_the_batch_to_try_gives_every_gpu_a_micro_batch(capsys):
    assert plan.main(["llama3-8b", "kto_lora", *EIGHT, "--nodes", "16"]) == 1
    assert "global_batch_size=64; try global_batch_size=256." in capsys.readouterr().err


def test_what_is_known_or_small_is_not_remarked_on(printed_by):
    said = printed_by("plan", "llama3-8b", "lora", *EIGHT, "--host-memory", "1800")
    assert not [words for words in ("not checked", "as many", "training alone", "nearest recipe") if words in said]


def test_of_two_gpus_with_as_much_memory_the_cheaper_one_is_smaller():
    request = asked("llama3-70b", "qlora", "H100", 1)
    assert extremes.smallest_hardware(request, Workload(1e9)).cluster.instance == "gpu_1x_h100_pcie"


# The longest sequence.


def longest(*words):
    """Return the length that the planner finds, and its reason."""
    said = " ".join(screen(*words, "--longest").split())
    length, why = re.search(r"The longest sequence that fits has ([\d,]+) tokens \((.+?)\)\.", said).groups()
    assert f"sequences of {length} tokens per step" in said
    return int(length.replace(",", "")), why


@pytest.mark.parametrize(("name", "method", "gpu"), [("qwen3-8b", "qlora", "4090"), ("llama3-8b", "lora", "3090")])
def test_the_longest_sequence_fits_and_a_longer_one_does_not(name, method, gpu):
    words = (name, method, "--gpu", gpu, "--host-memory")
    length, why = longest(*words, "200G")
    assert length > 4096
    assert why == "to within about 6 %; with a longer one, the high end of the memory range would not fit"
    request, longer = asked(name, method, gpu, 1, host_memory=200), length * 17 // 16 // 1024 * 1024 + 1024
    assert search(replace(request, recipe=replace(request.recipe, sequence_length=longer))).best is None
    alone, why = longest(*words, "0")
    assert alone <= length and why.endswith(" without offloading, which counts if --host-memory is given")


def test_no_sequence_is_longer_than_the_model_can_read():
    assert longest("llama3-1b", *EIGHT) == (131072, "the model has no more positions")


# Which hardware.


@pytest.mark.every
def test_the_cheapest_and_the_smallest_are_what_they_are_called():
    request, work = asked("llama3-8b"), Workload(1e8)
    choices = extremes.by_price(request, work)
    costs = [work.dollars(plan) for plan in choices]
    assert costs == sorted(costs) and len(costs) >= 20
    first = choices[0]
    hourly = INSTANCES[first.cluster.instance].dollars * first.cluster.nodes
    assert costs[0] == pytest.approx(work.hours(first) * hourly)
    dear = Workload(1e8, prices=prices([f"{first.cluster.instance}=9999"]))
    assert extremes.by_price(request, dear)[0].cluster.instance != first.cluster.instance
    least = extremes.smallest_hardware(request, work)
    smaller = [Cluster(gpu, host_memory_gib=64) for gpu in DESKTOP if gpu.memory_gib < least.cluster.gpu.memory_gib]
    assert least.cluster.gpus == 1 and smaller
    assert all(search(plan_request(request.recipe, one)).best is None for one in smaller)


@pytest.mark.every
def test_hardware_that_no_deadline_leaves_is_named(refusal):
    error = refusal("plan", "llama3-1b", "--which-gpu", "--tokens", "1000T", "--deadline", "1h")
    assert "nothing in the catalogue finishes within 1.0 h, with up to 16 nodes" in error


@pytest.mark.every
def test_a_deadline_leaves_out_what_is_too_slow():
    request, work = asked("llama3-8b", "lora"), Workload(1e9)
    hours = work.hours(extremes.by_price(request, work)[0])
    quick = extremes.by_price(request, work, hours / 3)
    assert quick and all(work.hours(plan) <= hours / 3 for plan in quick)
    assert extremes.smallest_hardware(request, work, hours / 3).cluster.gpus > 1


@pytest.mark.every
def test_the_answer_is_data_too(answer):
    found = answer("llama3-8b", "--method", "lora", "--which-gpu", "--tokens", "100M")
    rows = found["which_gpu"]
    assert rows[0]["is"][0] == "cheapest" and sum("smallest" in row["is"] for row in rows) == 1
    assert found["hardware"]["instance"] == rows[0]["instance"]
    assert found["plans"][found["best"]]["dollars"] == pytest.approx(rows[0]["dollars"])


# Every variant by its name.


@pytest.mark.parametrize(
    ("name", "variant", "kept"),
    [
        ("llama3-8b", "dpo_lora", {}),
        ("llama3-8b", "pretrain", {}),
        ("llama3-8b", "dora", {}),
        ("llama3-8b", "long_context", {}),
        ("llama3-70b", "tensor", {"tensor": 8}),
        ("mixtral-8x7b", "expert", {"expert": 8}),
        ("tiny", "pretrain", {}),
    ],
)
def test_every_variant_has_a_name(answer, name, variant, kept):
    found = answer(name, "--method", variant, *EIGHT, "--nodes", "8" if kept else "1")
    assert found["model"]["method"] == variant
    assert all(one["layout"] | kept == one["layout"] for one in found["plans"])
    assert f" {variant} " in found["plans"][0]["command"]
    page = model_recipe.find(name, variant)
    assert found["model"]["sequence_length"] == page.sequence_length


def test_a_variant_that_offloads_offloads_everywhere(answer):
    found = answer("llama3-1b", "--method", "full_offload", *EIGHT)
    assert {one["config"] for one in found["plans"]} == {model_recipe.find("llama3-1b", "full_offload").deepspeed}


def test_a_pair_takes_more_memory_than_a_sequence(answer):
    settings = ("deepspeed=zero2.json", "micro_batch_size=1", "gradient_checkpointing=true")
    pair, one = (
        answer("llama3-8b", "--method", method, *EIGHT, *settings, "sequence_length=2048")["plans"][0]
        for method in ("dpo_lora", "lora")
    )
    assert pair["gpu_peak_gib"] > one["gpu_peak_gib"] + 0.5


# Suggestions.

PIPELINE_OF_TENSORS = ("layout.tensor=8", "layout.pipeline=8")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("llama3-8b", "--gpu", "RTX 4090", "--host-memory", "32"), {"--method", "--host-memory", "--nvme"}),
        (("llama3-8b", "--method", "qlora", "--gpu-memory", "12", "sequence_length=8192"), {"--gpus"}),
        (
            ("llama3-8b", "--gpu", "A100 80GB", "--host-memory", "16", "--sequence-length", "65536"),
            {"--method", "--host-memory"},
        ),
        # What the user has set stays.
        (("llama3-8b", "--gpu", "RTX 4090", "--host-memory", "0", "micro_batch_size=64"), {"micro_batch_size=4"}),
        (("llama3-8b", "--method", "lora", "--gpu", "A100 80GB", "micro_batch_size=64"), set()),
        (("llama3-405b", "--gpu", "H100", "--gpus", "8", "--nodes", "8", *PIPELINE_OF_TENSORS), set()),
        (("llama3-70b", "--gpu", "H100", "--gpus", "8", "deepspeed=zero3.json", "layout.sequence=1"), {"--nodes"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_is_suggested_fits(words, expected, capsys):
    assert plan.main(words) == 1
    said = capsys.readouterr().err
    found = re.search(r"What would fit: (.+)\.\n", said)
    changes = found[1].split("; ") if found else []
    assert expected <= {change.split()[0] for change in changes} and (changes or not expected)
    for change in changes:
        typed, speed = re.fullmatch(r"(.+) \(([0-9,]+) tokens/s\)", change).groups()
        key, is_method = typed.partition("=")[0], typed.startswith("--method")
        others = [word for word in words if not word.startswith(f"{key}=")]
        if typed.startswith("--host-memory") and "--host-memory" in others:
            at = others.index("--host-memory")
            del others[at : at + 2]
        others = [word for word in others if not (is_method and word in ("--method", "lora", "qlora"))]
        assert plan.main([*others, *shlex.split(typed), "--json"]) == 0, (change, capsys.readouterr().err)
        answer = json.loads(capsys.readouterr().out)
        gpus = answer["hardware"]["nodes"] * answer["hardware"]["gpus_per_node"]
        assert f"{answer['plans'][0]['tokens_per_second_per_gpu'] * gpus:,.0f}" == speed, change


def test_a_shorter_sequence_is_suggested(capsys):
    words = ("llama3-8b", "--method", "qlora", "--gpu-memory", "12", "--host-memory", "32")
    assert plan.main([*words, "sequence_length=32768"]) == 1
    said = capsys.readouterr().err
    shorter = re.search(r"sequence_length=(\d+)", said)
    assert shorter and plan.main([*words, shorter[0]]) == 0


# Mistakes.


def test_other_software_is_planned_by_its_own_memory(answer, printed_by):
    """TRL with PEFT holds adapters and Adam's states in fp32 beside whole logits of 14 bytes: more than here."""
    words = ("llama3-8b", "lora", "--gpu", "A100-80GB", "micro_batch_size=1", "gradient_checkpointing=true")
    ours, theirs = (answer(*words, *more)["plans"][0] for more in ((), ("software=trl",)))
    assert theirs["gpu_peak_gib"] > 1.03 * ours["gpu_peak_gib"]
    assert "Memory and speed are those of software=peft" in printed_by("plan", *words, "software=peft")
    with pytest.raises(UserError, match="software=unsloth: unknown; choose from peft, trl"):
        plan.main([*words, "software=unsloth"])
    with pytest.raises(UserError, match=r"software=trl and software=peft: a plan is for one software"):
        plan.main([*words, "software=trl", "software=peft"])


MISTAKES = {
    ("llama3-8b", *EIGHT, "--tokens", "many"): "--tokens many: must be a number above 0",
    ("llama3-8b", *EIGHT, "--tokens", "0"): "--tokens 0: must be a number above 0",
    ("llama3-8b", *EIGHT, "--tokens", "1.2.3"): "--tokens 1.2.3: must be a number",
    ("llama3-8b", *EIGHT, "--tokens", "1B", "epochs=3"): "--tokens 1B and epochs=...: give one of them",
    ("llama3-8b", *EIGHT, "data.path=nobody/none"): "data.path=nobody/none: only local files can be counted",
    ("llama3-8b", *EIGHT, "data.path=none.jsonl"): "data.path=none.jsonl: no such file.",
    ("llama3-8b", *EIGHT, "data.path=/dev/null"): "data.path=/dev/null: only local files can be counted",
    ("llama3-8b", *EIGHT, "--price", "2,50", "--tokens", "1B"): "--price 2,50: not a price; give US dollars",
    ("llama3-8b", *EIGHT, "--price", "30"): "--price needs an amount of training: add --tokens 500M",
    ("--gpu", "4090", "--price", "3"): "name a model first",
    ("--gpu", "4090", "--explain"): "name a model first",
    ("llama3-8b", "--which-gpu", "--explain"): "--which-gpu and --explain: give one of them",
    ("llama3-8b", *EIGHT, "--serve", "4x8k", "--price", "3"): "--serve and --price: give one of them",
    ("llama3-8b", "--gpu", "8xH100"): "--gpu H100 --gpus 8.",
    ("llama3-8b", *EIGHT, "--tokens", "2B", "--deadline", "1m"): "nodes of H100 finishes within 1 min.",
    ("qwen3-30b-a3b", *EIGHT): "Recipes with this size: nemotron_h-30b-a3b, qwen3_moe-30b-a3b.",
    ("llama3-8b", "three_d", *EIGHT): "use layout.tensor=2 or --gpus 8 --nodes 4.",
    ("llama3-8b", *EIGHT, "--tokens", "1B", "--price", "30", "--price", "40"): "two prices for a node, 30 and 40",
    (
        "llama3-8b",
        *EIGHT,
        *("--tokens", "1B", "--price", "p5.48xlarge=30", "--price", "P5.48XLARGE=31"),
    ): "two prices for p5.48xlarge, 30 and 31",
    ("llama3-8b", *EIGHT, "--tokens", "1B", "--price", "30EUR"): "--price 30EUR: not a price; give US dollars",
    ("llama3-8b", *EIGHT, "--tokens", "1B", "--price", "£30"): "--price £30: not a price",
    ("llama3-8b", *EIGHT, "--tokens", "1B", "--price", "cheap"): "--price cheap: not a price",
    ("llama3-8b", *EIGHT, "--tokens", "1B", "--price", "-3"): "--price -3: not a price",
    ("llama3-8b", *EIGHT, "--tokens", "1B", "--price", "0"): "--price 0: not a price",
    ("llama3-8b", *EIGHT, "--tokens", "1B", "--price", "p5.48=3"): "unknown instance p5.48; did you mean p5.4",
    ("llama3-8b", *EIGHT, "--tokens", "1B", "--deadline", "8"): "--deadline 8: must be a time above 0 with its unit",
    ("llama3-8b", *EIGHT, "--tokens", "1B", "--deadline", "soon"): "--deadline soon: must be a time",
    ("llama3-8b", *EIGHT, "--deadline", "8h"): "--deadline needs an amount of training: add --tokens",
    ("llama3-8b", *EIGHT, "--tokens", "1000T", "--deadline", "1h"): "The fastest is 128 x 8 GPUs with",
    ("llama3-8b", "--which-gpu", *EIGHT): "--which-gpu and --gpu: give one of them",
    ("llama3-8b", "--which-gpu", "--longest"): "--which-gpu and --longest: give one of them",
    ("llama3-8b", "--which-gpu", "--price", "3"): "--price 3: name the instance",
    ("llama3-8b", *EIGHT, "--serve", "8x8k", "--method", "lora"): "--serve and --method: give one of them",
    ("llama3-8b", *EIGHT, "--serve", "8x8k", "lora"): "--serve and --method: give one of them",
    ("llama3-8b", *EIGHT, "--serve", "8x8k", "--host-memory", "64"): "--serve and --host-memory: give one of them",
    ("llama3-8b", *EIGHT, "--serve", "8x8k", "micro_batch_size=2"): "--serve and micro_batch_size=2: give one of them",
    ("--gpu", "4090", "--serve", "4x4k"): "name a model first",
    ("llama3-8b", "--which-gpu", "--serve", "4x4k"): "--which-gpu and --serve: give one of them",
    ("llama3-8b", "--which-gpu", "--machine", "here.json"): "--which-gpu and --machine: give one of them",
    ("llama3-8b", "--which-gpu", "software=peft"): "--which-gpu and software=...: give one of them",
    ("llama3-8b", *EIGHT, "--network", "100"): "--network 100: a single node uses none; add --nodes M",
    ("llama3-8b", *EIGHT, "--deadline", "8h", "--longest", "--tokens", "1B"): "--deadline and --longest: give one",
    ("--gpu", "4090", "--sequence-length", "32k"): "name a model first",
    ("--gpu", "4090", "--method", "lora"): "name a model first",
    (
        *("llama3-8b", *EIGHT, "--tokens", "1M", "--price", "p4d.24xlarge=3"),
    ): "--price p4d.24xlarge=3: not the price of this hardware; give --gpu p4d.24xlarge",
    (
        *("llama3-8b", *EIGHT, "--examples", "1k", "--example-tokens", "5000"),
    ): "--example-tokens 5000: examples of more than sequence_length=4096 tokens are left out",
    ("llama3-8b", *EIGHT, "--serve", "64"): "--serve 64: write the requests at once and their tokens",
    ("llama3-8b", *EIGHT, "--serve", "0x8k"): "--serve 0x8k: write the requests",
    ("llama3-8b", *EIGHT, "--serve", "8x8k", "--longest"): "--serve and --longest: give one of them",
    ("llama3-8b", *EIGHT, "--longest", "sequence_length=99"): "--longest searches for the sequence length",
    ("llama3-8b", *EIGHT, "--method", "dpo_lorra"): "unknown variant of llama3 'dpo_lorra'; did you mean 'dpo_lora'",
    ("llama3-8b", "dpo_lorra", *EIGHT): "unknown variant of llama3 'dpo_lorra'; did you mean 'dpo_lora'",
}


# Kilobytes of the cache per token, Table 1 of arXiv:2505.09343; the vLLM test of tests/test_serve.py counts the same.
@pytest.mark.parametrize(
    ("model", "kilobytes"), [("deepseek-v3", 70.272), ("qwen2_5-72b", 327.680), ("llama3-405b", 516.096)]
)
def test_serving_counts_the_cache(model, kilobytes):
    found = json.loads(screen(model, *EIGHT, "--nodes", "4", "--serve", "100x4k", "--json"))
    for kind in found.values():
        assert kind["cache_gib"] * 2**30 == pytest.approx(1000 * kilobytes * 100 * 4096)
    assert found["bf16"]["weights_gib"] * 2**30 == pytest.approx(
        2 * pages.find(model, "full").model.parameters, rel=1e-3
    )


def test_serving_finds_the_fewest_gpus():
    """8 requests of 8,192 tokens are 8 GiB: 15.0 GiB of weights in bf16 need a second 4090, and 4 bits do not."""
    found = json.loads(screen("llama3-8b", "--gpu", "4090", "--gpus", "4", "--serve", "8x8k", "--json"))
    assert [(kind["tensor"], kind["pipeline"]) for kind in found.values()] == [(2, 1), (1, 1), (1, 1)]
    assert found["bf16"]["gpu_gib"] == pytest.approx(found["bf16"]["weights_gib"] / 2 + 8 / 2)
    assert found["int4"]["requests"] == int(0.92 * 23.65 - found["int4"]["weights_gib"])
    words = ("--gpu", "4090", "--serve", "8x8k")
    assert "serve.py RUN_OR_FOLDER, after python scripts/export.py RUN --quantize int8" in screen("llama3-8b", *words)
    wide = ("--gpu", "A100-80GB", "--serve", "1x128k", "--json")
    sliding = json.loads(screen("gemma3-27b", *wide))["bf16"]["cache_gib"]
    assert sliding == pytest.approx((10 * 131072 + 52 * 1024) * 8192 / 2**30), "52 of 62 layers see 1,024 tokens"


def test_the_variant_may_be_the_second_word_as_in_launch(capsys):
    answers = []
    for words in (
        ["llama3-8b", "dpo_lora", *EIGHT],
        ["llama3-8b", *EIGHT, "--method", "dpo_lora"],
        ["llama3-8b", *EIGHT],
    ):
        assert main.run("plan", words) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize("words", MISTAKES, ids=lambda words: " ".join(words))
def test_a_mistake_is_answered_in_a_line_or_two(words, refusal):
    said = refusal("plan", *words)
    assert MISTAKES[words] in said and said.startswith("plan.py: ") and len(said.strip().splitlines()) <= 2, said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sequencelength", "4096"], "--sequencelength: no such option; did you mean --sequence-length?"),
        (["--seq_len", "4096"], "--seq_len: no such option; did you mean --sequence-length?"),
        (["--budget", "500"], "--budget: no such option; did you mean --price?"),
        (["--out", "plan"], "--out: no such option; did you mean --write?"),
        (["--tokns=1B"], "--tokns: no such option; did you mean --tokens?"),
        (["--gpus", "eight"], "--gpus eight: must be a whole number."),
        (["--host-memory", "64Q"], "--host-memory: 64Q is not a size in GiB, such as 64; see plan.py --help."),
        (
            ["--sequence-length", "long"],
            "long is not a number of tokens, such as 4096 or 4k; see plan.py --help.",
        ),
        (["--frobnicate"], "--frobnicate: no such option; plan.py --help lists the options."),
    ],
)
def test_a_misspelled_option_is_answered_in_a_line(words, said, capsys):
    with pytest.raises(SystemExit) as end:
        main.run("plan", ["llama3-8b", "--gpu", "H100", *words])
    assert end.value.code == 2 and capsys.readouterr().err.endswith(f"{said}\n")


def test_an_empty_file_has_no_tokens(tmp_path):
    (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match=r"empty\.jsonl: has no text to train on; give --tokens"):
        plan.main(["llama3-8b", *EIGHT, f"data.path={tmp_path}/empty.jsonl"])


def test_two_prices_are_refused_whatever_they_are():
    with pytest.raises(UserError, match="two prices for a node, 2 and 2"):
        prices(["2", "2"])


def test_the_size_of_large_files_is_estimated_from_their_first_examples(tmp_path, monkeypatch):
    source = SAMPLES / "extract" / "train.jsonl"
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    parquet.write_table(Table.from_pylist(rows), tmp_path / "train.parquet")
    page = pages.find("tiny", "lora")

    def size(path):
        data = replace(page.data, path=str(path), validation=None, validation_share="auto")
        return workload.size_of(replace(page, data=data))

    whole = size(source)
    assert whole.documents == len(rows) - 300 and not whole.estimated  # 5 %
    monkeypatch.setattr(workload, "FIRST", 500)
    monkeypatch.setattr(workload, "QUICK", source.stat().st_size - 1)
    for path in (source, tmp_path / "train.parquet"):
        found = size(path)
        assert found.estimated and found.examples == pytest.approx(whole.examples, rel=0.02)
        assert found.tokens == pytest.approx(whole.tokens, rel=0.03)
    counted = workload.tokens_of(replace(page, data=replace(page.data, path=str(source), max_examples=None)))
    for name in ("hub/data/train-00000-of-00001.parquet", "saved/data-00000-of-00001.arrow", "named/train.jsonl"):
        file, folder = tmp_path / name, tmp_path / name.partition("/")[0]
        file.parent.mkdir(parents=True)
        (folder / "README.md").write_text("# Not data")
        if file.suffix == ".jsonl":
            (folder / "test.jsonl").write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
            file.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
        elif file.suffix == ".parquet":
            parquet.write_table(Table.from_pylist(rows), file)
        else:
            Dataset.from_list(rows).save_to_disk(folder)
        found = workload.tokens_of(replace(page, data=replace(page.data, path=str(folder), max_examples=None)))
        assert found == pytest.approx(counted, rel=0.03), name
    many = tmp_path / "many.jsonl"
    many.write_text(source.read_text(encoding="utf-8") * 3, encoding="utf-8")
    assert size(many).examples - size(many).documents == 500  # at most
