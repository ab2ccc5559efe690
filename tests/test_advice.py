"""The advice of a refusal and the plans of the planner are accepted by the launcher, not refused in turn."""

import contextlib
import io
import re
from functools import cache

import pytest

from deepspeed_recipes.launching import paths, preflight
from deepspeed_recipes.planning.hardware.cluster import cluster
from deepspeed_recipes.planning.search import model_recipe
from deepspeed_recipes.planning.search.strategies import plan_request, search
from deepspeed_recipes.recipe import deepspeed_file, overrides, own_code, pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.training.data import text_files
from deepspeed_recipes.training.data.forms import formats
from tests.tiers import tiered

FAULTS = (
    "layout.tensor=2",
    "layout.tensor=3",
    "layout.pipeline=2",
    "layout.pipeline=64",
    "layout.sequence=2",
    "layout.expert=2",
    "layout.tensor=2 layout.sequence=2",
    "layout.pipeline=2 layout.sequence=2",
    "layout.pipeline=2 tiled_loss=true",
    "layout.pipeline=2 layer_decay=0.9",
    "layout.pipeline=2 lora.init=pissa",
    "layout.pipeline=2 lora.target_modules=q_proj,lm_head",
    "layout.tensor=2 lora.dora=true",
    "layout.tensor=2 lora.fused=true",
    "layout.sequence=2 neftune_alpha=5",
    "micro_batch_size=1",
    "micro_batch_size=3",
    "global_batch_size=1",
    "global_batch_size=7",
    "sequence_length=10000000",
    "gradient_checkpointing=selective",
    "gradient_checkpointing=selective layout.tensor=2",
    "activation_offloading=true",
    "activation_offloading=true gradient_checkpointing=false",
    "precision=fp16",
    "fp8=true",
    "fp8=true precision=fp32",
    "neftune_alpha=5",
    "tiled_loss=true",
    "tiled_mlp=true",
    "router_aux_loss_coef=0.01",
    "optimizer=muon",
    "optimizer=muon precision=fp16",
    "optimizer=muon deepspeed=zero2_offload.json",
    "optimizer=adamw_8bit layout.tensor=2",
    "model.quantization=nf4 layout.tensor=2",
    "model.quantization=nf4 layout.pipeline=2",
    "deepspeed=zero3.json layout.pipeline=2",
    "deepspeed=zero3_hpz.json layout.sequence=2",
    "deepspeed=tensor_parallel.json",
    "deepspeed=expert_parallel.json",
    "deepspeed=pipeline.json",
    "deepspeed=zero2.json layout.expert=2",
    "data.streaming=true",
    "data.streaming=true max_steps=5",
    "data.streaming=true max_steps=5 data.validation_share=0.1",
    "distill.top_k=50",
    "distill.teacher=MODEL",
    "dpo.beta=0.2",
    "grpo.group_size=3",
)
UNANSWERED = re.compile(
    r"^\w+\.\w+: a setting of the method|no such file or folder|"
    r"(name|use|set data\.validation to) a(nother)? (file|family|model folder|Hub id)|launch\.py --list|"
    r"leave out distill\.teacher|^[^ ]+:\d+:\d+: error: "
)
"""Refusals whose fix is the user's choice of a file, a variant or a model, not a value; and what the linter says of a
file, whose fixes `tests/test_config_advice.py` follows."""
WAY = re.compile(r"--gpus \d+(?: --nodes \d+)?|\b[a-z_0-9]+(?:\.[a-z_]+)?=[\w./-]*\w")
KEYS = set(overrides.override_keys())


def ways(message):
    """Return the changes that a message advises, each of which is enough: lists of `key=value` and of `--gpus N`."""
    if nearest := re.search(r"the nearest multiples are: (\d+), (\d+)\.", message):
        return [[f"global_batch_size={number}"] for number in nearest.groups()]
    if removed := re.search(r"(?:remove|leave out) (data\.streaming)\.", message):
        return [[f"{removed[1]}=false"]]
    found = re.split(r"[;:.] (?:or )?(?=(?:use|set|add|needs) )", message, maxsplit=1)
    advice = re.sub(r": .*", "", found[-1]) if len(found) > 1 else ""  # a reason may follow
    each = [WAY.findall(way) for way in re.split(r",? or |, (?=deepspeed=)", advice)]
    return [way for way in each if way and all(word.startswith("--") or word.partition("=")[0] in KEYS for word in way)]


@cache
def refusal(name, variant, ranks, words):
    """Return what the launcher refuses before it reads data, or None."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            recipe = paths.locate(overrides.apply(pages.find(name, variant), words))
            preflight.check_config(recipe, ranks, ranks)
            preflight.check_layout(recipe, deepspeed_file.read(recipe.deepspeed), ranks, ranks)
            for key, found in own_code.of_recipe(recipe).items():
                own_code.check_files(key, found)
            formats.reading_of(recipe.data)
            text_files.weights(recipe.data)
        except UserError as error:
            return str(error)
    return None


def follow(name, variant, ranks, words, said=()):
    """Follow every way that a refusal advises, and what is advised then, until the run is accepted."""
    message = refusal(name, variant, ranks, words)
    if message is None or UNANSWERED.search(message):
        return
    where = "\n".join((f"{name} {variant} --gpus {ranks} {' '.join(words)}", *said, message))
    assert message not in said and len(said) < 4, f"advice that is refused in turn:\n{where}"
    advised = ways(message)
    assert advised, f"no advice:\n{where}"
    for way in advised:
        number, kept = ranks, dict(word.split("=", 1) for word in words)
        for change in way:
            if change.startswith("--gpus"):
                _, number, *nodes = change.split()
                number = int(number) * (int(nodes[1]) if nodes else 1)
            else:
                key, value = change.split("=", 1)
                kept[key] = value
        follow(name, variant, number, tuple(f"{key}={value}" for key, value in kept.items()), (*said, message))


CORE = ("tiny", "tiny_vision", "mixtral")


@pytest.mark.parametrize("family", tiered(pages.families(), CORE))
def test_the_advice_of_a_refusal_leads_to_a_run(family):
    page = pages.page(family)
    size, refused = next(iter(page.SIZES)), 0
    for number, variant in enumerate(pages.variants(page)):
        for at, fault in enumerate(FAULTS):
            words, ranks = tuple(fault.split()), (1, 2, 3, 4, 8)[(number + at) % 5]
            follow(f"{family}-{size}", variant, ranks, words)
            refused += refusal(f"{family}-{size}", variant, ranks, words) is not None
    assert refused > 3 * len(pages.variants(page))


def test_the_ways_of_a_message_are_read():
    assert ways("layout.tensor=2: no; use layout.tensor=1 deepspeed=zero1.json or --gpus 8 --nodes 2.") == [
        ["layout.tensor=1", "deepspeed=zero1.json"],
        ["--gpus 8 --nodes 2"],
    ]
    assert ways("a=b: why; use optimizer=adamw, or deepspeed=zero2.json.") == [
        ["optimizer=adamw"],
        ["deepspeed=zero2.json"],
    ]
    assert ways("fp8=true with lora=...: use fp8=false: too small to gain.") == [["fp8=false"]]
    assert not ways("lora.rank=x: must be a whole number.")


HARDWARE = (
    *(("RTX 3090", 1, 1), ("RTX 4090", 2, 1), ("L4", 4, 1), ("A10G", 8, 1), ("V100 16GB", 8, 1), ("A100 40GB", 8, 1)),
    *(("A100 80GB", 4, 1), ("H100", 1, 1), ("H100", 8, 1), ("H100", 8, 4), ("H200", 8, 2), ("B200", 8, 8)),
)
"""GPUs, their number per node, and nodes, on each of which every variant is planned."""


@pytest.mark.parametrize("family", tiered(pages.families(), ("gpt2", "tiny_vision")))
def test_every_plan_that_is_printed_is_accepted_by_the_launcher(family):
    page, planned = pages.page(family), 0
    size = next(iter(page.SIZES))
    for variant in pages.variants(page):
        recipe = pages.find(f"{family}-{size}", variant)
        for gpu, gpus, nodes in HARDWARE:
            hardware = cluster(gpu, gpus, nodes, host_memory=1000)
            found = search(plan_request(recipe, hardware, model_recipe.pinned(recipe)))
            for plan in (*found.plans, *found.tight):
                words = tuple(overrides.differences(recipe, plan.recipe))
                message = refusal(f"{family}-{size}", variant, hardware.gpus, words)
                assert message is None, f"{family}-{size} {variant} on {gpus} {gpu} {' '.join(words)}: {message}"
                planned += 1
    assert planned > 8 * len(pages.variants(page))  # minimax_m2, of 229B, fits on few of them: 98 plans of 12 variants


def test_a_plan_that_the_launcher_refuses_is_noticed():
    words = ("layout.tensor=2", "lora.dora=true", "deepspeed=tensor_parallel.json")
    assert "DoRA needs the norm of each whole matrix" in str(refusal("tiny-3m", "lora", 2, words))
