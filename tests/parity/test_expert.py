"""Experts spread over ranks (AutoEP) train exactly the mixture that plain PyTorch trains in one process."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from recipes.spec.pages import ROOT
from recipes.spec.recipe import Layout
from recipes.spec.run_folder import RunFolder, read_json, read_jsonl, write_json, write_recipe
from recipes.training import run as training_run
from recipes.training.draft import TINY_MODEL
from tests.parity import plain
from tests.small import small

SETTINGS = plain.Settings()
RELATIVE = 1e-5
EXPERTS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
}


def mixture(family: str, folder: Path) -> Path:
    """Write a random mixture whose wrong gradients show: large initial weights."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **EXPERTS[family],
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=list(EXPERTS))
def reference(request, tmp_path_factory, conversations):
    folder = mixture(request.param, tmp_path_factory.mktemp(request.param))
    return folder, *plain.train(folder, conversations, SETTINGS)


def config(stage: int, folder: Path) -> str:
    """Write expert_parallel.json with another ZeRO stage, and return its path."""
    path = folder / "expert_parallel.json"
    values = read_json(ROOT / "configs" / "expert_parallel.json")
    values["zero_optimization"]["stage"] = stage
    write_json(path, values)
    return str(path)


@pytest.mark.parametrize(("world_size", "stage", "accumulation"), [(2, 1, 1), (2, 1, 2), (2, 0, 1), (2, 2, 2), (2, 3, 2), (4, 1, 1), (4, 2, 1), (4, 3, 1), (4, 0, 1)])
def test_same_model_as_plain_pytorch(ranks, tmp_path, conversations, reference, world_size, stage, accumulation):
    folder, records, weights = reference
    run = RunFolder(tmp_path / "run")
    recipe = small(
        folder,
        conversations,
        config(stage, tmp_path),
        learning_rate=SETTINGS.learning_rate,
        weight_decay=SETTINGS.weight_decay,
        adam_epsilon=SETTINGS.epsilon,
        max_grad_norm=SETTINGS.clip,
        max_steps=SETTINGS.steps,
        global_batch_size=8,
        micro_batch_size=8 // world_size // accumulation,
        layout=Layout(expert=2),
    )
    write_recipe(run, recipe)
    ranks.check(training_run.main, str(run.path), world_size=world_size, log=tmp_path / "log")
    logged = read_jsonl(run.metrics)
    for ours, theirs in zip(logged, records, strict=True):
        print(ours["loss"]/theirs["loss"]-1, ours["grad_norm"] / theirs["grad_norm"]-1)
    exported = load_file(run.export / "model.safetensors")
    print(max((plain.worst(exported[n].float(), weights[n]), n) for n in exported))
    for ours, theirs in zip(logged, records, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=RELATIVE)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=RELATIVE)
    assert set(exported) == set(weights)
    for name, weight in exported.items():
        assert plain.worst(weight, weights[name]) <= 1, name
