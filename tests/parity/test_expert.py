"""Expert parallelism (AutoEP) trains exactly the mixture that plain PyTorch trains in one process.

DeepSpeed has no preset for the last five families; `parallel/expert.py` makes theirs.
"""

import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from deepspeed_recipes.recipe import deepspeed_file
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.recipe import Layout, Recipe
from deepspeed_recipes.recipe.run_folder import (
    forget_after,
    newest_checkpoint,
    read_json,
    read_jsonl,
    write_json,
    write_recipe,
)
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training.arguments import deepspeed_config
from deepspeed_recipes.training.checkpoint import universal
from deepspeed_recipes.training.model import transforms
from deepspeed_recipes.training.model.draft import TINY_MODEL
from deepspeed_recipes.training.parallel import expert
from tests import ROOT
from tests.conftest import write_rows
from tests.parity import gate, plain
from tests.ranks import run_on
from tests.tiers import tiered
from tests.workers import mistakes

SETTINGS = plain.Settings()
DEEPSEEK = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
FAMILIES = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    },
    "deepseek_v2": {**DEEPSEEK, "q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": {**DEEPSEEK, "q_lora_rank": 16, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    "glm4_moe": {
        **{name: size for name, size in DEEPSEEK.items() if "kv" not in name or name == "num_key_value_heads"},
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    "qwen3_next": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 16,
        "layer_types": ["full_attention"] * 2,
    },
    "qwen3_5_moe_text": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 16,
        "layer_types": ["full_attention"] * 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        },
    },
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48},
}
BALANCED = 0.5
"""A coefficient of the load-balancing loss at which it shows: its gradients are of the size of the others."""


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Return a function that writes a random mixture whose wrong gradients show: large initial weights."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)

    def write(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            family,
            vocab_size=len(tokenizer),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            head_dim=8,
            initializer_range=0.2,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            **{"num_key_value_heads": 2, **FAMILIES[family]},
        )
        model = AutoModelForCausalLM.from_config(config)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return {family: write(family) for family in FAMILIES}.__getitem__


@pytest.fixture(scope="module")
def reference(mixture, conversations):
    """Return what plain PyTorch makes of each family."""
    return {family: plain.train(mixture(family), conversations, SETTINGS) for family in FAMILIES}.__getitem__


def recipe_for(model: Path, data: Path, folder: Path, stage: int, **changes: Any) -> Recipe:
    """Return the recipe of `SETTINGS`, its experts spread over two ranks, at a ZeRO stage."""
    path = folder / "expert_parallel.json"
    config = read_json(ROOT / "configs" / "expert_parallel.json")
    config["zero_optimization"]["stage"] = stage
    write_json(path, config)
    return gate.recipe_for(SETTINGS, model, data, str(path), **{"layout": Layout(expert=2), **changes})


CASES = [(family, stage, *ranks) for family, stage, ranks in product(FAMILIES, (1, 2, 3), ((2, 2), (4, 1)))]
"""Every family, stage, number of ranks and accumulation."""
CORE = {("deepseek_v3", 3, 4, 1)}


@pytest.mark.parametrize(("family", "stage", "world_size", "accumulation"), tiered(CASES, CORE))
def test_same_model_as_plain_pytorch(
    ranks, tmp_path, conversations, mixture, reference, family, stage, world_size, accumulation
):
    size = 8 // world_size // accumulation
    run = run_on(
        ranks,
        recipe_for(mixture(family), conversations, tmp_path, stage, micro_batch_size=size),
        tmp_path,
        world_size=world_size,
    )
    gate.agree(run, *reference(family))
    engine = read_json(run.deepspeed)
    assert engine["zero_optimization"]["stage"] == stage
    assert engine["gradient_accumulation_steps"] == accumulation
    assert engine["expert_parallel"]["autoep_size"] == 2 and "optimizer" not in engine


@pytest.mark.every
@pytest.mark.parametrize(
    ("family", "stage", "world_size", "spread"),
    [
        *(("mixtral", 1, 4, 2), ("mixtral", 1, 2, 2), ("qwen3_moe", 3, 4, 2), ("qwen3_moe", 3, 2, 2)),
        *(("deepseek_v3", 2, 4, 4), ("deepseek_v3", 2, 4, 2), ("deepseek_v3", 3, 4, 4)),
    ],
)
def test_a_resumed_run_logs_what_an_uninterrupted_one_logs(
    ranks, tmp_path, conversations, mixture, family, stage, world_size, spread
):
    """Written by four ranks with the experts spread over two, resumed as they were or on other ranks."""
    recipe = recipe_for(
        mixture(family), conversations, tmp_path, stage, global_batch_size=4, micro_batch_size=1, save_steps=3
    )
    run = run_on(ranks, recipe, tmp_path, world_size=4)
    expected = read_jsonl(run.metrics)
    weights = load_file(run.export / "model.safetensors")
    shutil.rmtree(run.checkpoints / "checkpoint-6")
    shutil.rmtree(run.export)
    forget_after(run, newest_checkpoint(run))
    layout = Layout(expert=spread)
    write_recipe(run, replace(recipe, layout=layout))
    if universal.is_needed(layout, run, world_size):
        universal.convert(newest_checkpoint(run))
    ranks.check(training_run.main, str(run.path), world_size=world_size, log=tmp_path / "again")
    resumed = read_jsonl(run.metrics)
    assert [row["step"] for row in resumed] == list(range(1, 7))
    bound = 1e-6 if (world_size, layout) == (4, recipe.layout) else 1e-5
    for key in ("loss", "grad_norm", "expert_load_max", "router_entropy"):
        assert [row[key] for row in resumed] == pytest.approx([row[key] for row in expected], rel=bound), key
    for name, weight in load_file(run.export / "model.safetensors").items():
        assert plain.worst(weight, weights[name]) < 0.1, name


@pytest.mark.parametrize(("family", "stage"), tiered([("mixtral", 1), ("deepseek_v3", 3)], {("deepseek_v3", 3)}))
def test_exports_the_bytes_that_plain_transformers_writes(ranks, tmp_path, conversations, mixture, family, stage):
    """A learning rate that is lost in rounding, so that the weights are those that plain transformers wrote."""
    recipe = recipe_for(mixture(family), conversations, tmp_path, stage, learning_rate=1e-30, max_steps=1, save_steps=1)
    run = run_on(ranks, recipe, tmp_path, function=mistakes.untrained)
    before = (mixture(family) / "model.safetensors").read_bytes()
    assert (run.export / "model.safetensors").read_bytes() == before
    assert (run.checkpoints / "checkpoint-1" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("stage", tiered([1, 3], {1}))
def test_answers_of_different_lengths_are_all_written(ranks, tmp_path, mixture, stage):
    """A rank that has ended its answer computes on: it holds experts that the others' tokens need."""
    long = "0 1 2 3 4 5 6 7 8 9 " * 3
    turns = [[("user", f"Q{one}?"), ("assistant", answer)] for one, answer in enumerate(["Yes.", long])]
    data = write_rows(
        tmp_path / "data.jsonl",
        [{"messages": [{"role": role, "content": text} for role, text in pair]} for pair in turns],
    )
    recipe = recipe_for(mixture("qwen3_moe"), data, tmp_path, stage, global_batch_size=2, micro_batch_size=1)
    data = replace(recipe.data, validation=str(data), metric="exact_match")
    run = run_on(ranks, replace(recipe, data=data, max_steps=60, learning_rate=5e-3, weight_decay=0.0), tmp_path)
    assert read_json(run.summary)["after"] == 1.0, "both answers are learned, so their lengths differ"


@pytest.mark.every
@pytest.mark.parametrize(("config", "layout"), [("expert_parallel.json", Layout(expert=2)), ("zero2.json", Layout())])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_balanced_like_plain_transformers(ranks, tmp_path, conversations, mixture, family, config, layout):
    """The loss is the mean over conversations of each one's own: each is a micro-batch here."""
    settings = replace(SETTINGS, router_aux_loss_coef=BALANCED)
    recipe = recipe_for(mixture(family), conversations, tmp_path, 1, micro_batch_size=1, router_aux_loss_coef=BALANCED)
    recipe = replace(recipe, deepspeed=str(ROOT / "configs" / config), layout=layout, gradient_checkpointing=True)
    run = run_on(ranks, recipe, tmp_path)
    gate.agree(run, *plain.train(mixture(family), conversations, settings))
    first = read_jsonl(run.metrics)[0]
    expected = routed(mixture(family), conversations)
    assert {key: first[key] for key in expected} == pytest.approx(expected, rel=1e-5)
    before, after = (read_json(folder / "config.json") for folder in (mixture(family), run.export))
    assert all(after[key] == before[key] for key in ("router_aux_loss_coef", "output_router_logits"))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_padding_is_not_balanced(mixture, family):
    """As transformers leaves it out by an attention mask."""
    model = AutoModelForCausalLM.from_pretrained(mixture(family))
    tokens, lengths = torch.arange(3, 27).view(2, 12), torch.tensor([[12] * 12, [3] * 3 + [0] * 9])
    batch = {"input_ids": tokens, "labels": tokens, "output_router_logits": True}
    expected = model(**batch, attention_mask=(lengths > 0).long()).aux_loss
    unmasked = model(**batch).aux_loss
    transforms.balance_experts(model, BALANCED, micro_batches=1)
    found = model(**batch, document_lengths=lengths)
    assert found.aux_loss.item() == pytest.approx(expected.item(), rel=1e-5) != unmasked.item()
    assert model(**batch).aux_loss == unmasked


ROUTED = [("zero2.json", Layout(), False), ("zero1.json", Layout(), True), ("pipeline.json", Layout(pipeline=2), False)]


@pytest.mark.parametrize(("config", "layout", "tiled"), tiered(ROUTED, ROUTED[:1]))
def test_only_the_recipe_asks_for_balance(ranks, tmp_path, conversations, mixture, reference, config, layout, tiled):
    """Whatever config.json says, and the export says it, too."""
    shutil.copytree(mixture("qwen3_moe"), tmp_path / "model")
    said = read_json(tmp_path / "model" / "config.json") | {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    write_json(tmp_path / "model" / "config.json", said)
    recipe = recipe_for(tmp_path / "model", conversations, tmp_path, 1, micro_batch_size=1, tiled_loss=tiled)
    run = run_on(ranks, replace(recipe, deepspeed=str(ROOT / "configs" / config), layout=layout), tmp_path)
    gate.agree(run, *reference("qwen3_moe"))
    after = read_json(run.export / "config.json")
    assert all(after[key] == said[key] for key in ("router_aux_loss_coef", "output_router_logits"))


def routed(folder: Path, data: Path) -> dict[str, float]:
    """Return how an untrained mixture routes the conversations, computed with loops."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    experts_, chosen = len(model.model.layers[0].mlp.gate.weight), model.config.num_experts_per_tok
    loads, entropies = [[0] * experts_ for _ in model.model.layers], []
    for tokens, _ in plain.examples(data, tokenizer, SETTINGS):
        with torch.no_grad():
            logits = model(input_ids=tokens, output_router_logits=True).router_logits
        for load, of_layer in zip(loads, logits, strict=True):
            for token in of_layer:
                entropies.append(torch.distributions.Categorical(logits=token).entropy().item())
                for one in token.argsort(descending=True)[:chosen]:
                    load[one] += 1
    shares = [count / (sum(load) / len(load)) for load in loads for count in load]
    return {
        "expert_load_max": max(shares),
        "expert_load_min": min(shares),
        "router_entropy": sum(entropies) / len(entropies),
    }


@pytest.mark.parametrize(
    "mistake",
    [
        {"scaled_experts": 0.5},  # divided by the ranks of another group
        {"scaled_experts": 2.0},
        {"decay_everything": True},  # what DeepSpeed's own optimizer does
        {"router_aux_loss_coef": 1e-3},
    ],
)
def test_a_wrong_reference_is_noticed(mixture, conversations, reference, mistake):
    records, weights = plain.train(mixture("mixtral"), conversations, replace(SETTINGS, **mistake))
    right, right_weights = reference("mixtral")
    assert abs(records[-1]["loss"] / right[-1]["loss"] - 1) > 10 * gate.LOSS
    assert max(plain.worst(weights[name], weight) for name, weight in right_weights.items()) > 10


def test_the_norm_counts_and_clips_experts(mixture, conversations, reference):
    records, _ = plain.train(mixture("mixtral"), conversations, replace(SETTINGS, scaled_experts=2.0))
    assert abs(records[0]["grad_norm"] / reference("mixtral")[0][0]["grad_norm"] - 1) > 100 * gate.LOSS
    assert all(row["grad_norm"] > SETTINGS.clip for row in reference("mixtral")[0])


def test_without_zero_is_refused(tmp_path, conversations):
    with pytest.raises(UserError, match=r"set zero_optimization\.stage to 1"):
        recipe = recipe_for(tmp_path, conversations, tmp_path, 0)
        deepspeed_config(recipe, deepspeed_file.read(recipe.deepspeed))


def test_noise_that_autoep_leaves_out_is_refused(tmp_path, conversations):
    AutoConfig.for_model("mixtral", router_jitter_noise=0.01).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"layout\.expert: router_jitter_noise=0\.01 in .* set it to 0 there"):
        expert.mixture(recipe_for(tmp_path, conversations, tmp_path, 1))
