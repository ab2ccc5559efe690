"""Modules that are trained whole beside adapters, compared with plain PyTorch and PEFT, exported and merged."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from deepspeed_recipes.launching import preflight
from deepspeed_recipes.launching.paths import locate
from deepspeed_recipes.planning.model_profile import counts
from deepspeed_recipes.prove.techniques import random_qwen3
from deepspeed_recipes.recipe import overrides, pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.recipe import Lora
from deepspeed_recipes.recipe.run_folder import read_json
from deepspeed_recipes.training import export
from deepspeed_recipes.training.model import lora as adapters
from tests.parity import gate, plain
from tests.tiers import tiered

SETTINGS = plain.Settings(steps=5, learning_rate=1e-3)
LORA = Lora(rank=4, alpha=8)
CASES = {
    **{f"tied_zero{stage}": (f"zero{stage}.json", True, "embed_tokens", {}) for stage in range(4)},
    **{f"apart_zero{stage}": (f"zero{stage}.json", False, "embed_tokens,lm_head", {}) for stage in range(4)},
    "head_zero3": ("zero3.json", False, "lm_head", {}),
    "tiled_zero2": ("zero2.json", False, "lm_head", {"tiled_loss": True}),
    "tiled_zero3": ("zero3.json", True, "embed_tokens", {"tiled_loss": True}),
}


@pytest.fixture(scope="module")
def apart_folder(tmp_path_factory):
    """Make a model whose head has its own weight."""
    return random_qwen3(tmp_path_factory.mktemp("apart"), tie_word_embeddings=False)


@pytest.mark.parametrize("case", tiered(CASES, {"tied_zero2", "apart_zero3"}))
def test_whole_modules_are_trained_exported_and_merged(
    ranks, tmp_path, model_folder, apart_folder, conversations, case
):
    config, tied, names, changes = CASES[case]
    folder = model_folder if tied else apart_folder
    lora = replace(LORA, modules_to_save=names)
    recipe = gate.recipe_for(SETTINGS, folder, conversations, config, lora=lora, save_steps=3, **changes)
    run = gate.run_with_a_break(ranks, recipe, tmp_path)
    records, weights = plain.train(
        folder, conversations, SETTINGS, prepare=lambda model: adapters.add(model, lora, recipe.seed)
    )
    gate.agree_on_steps(run, records)
    model = export.load(run.export, dtype=torch.float32)
    exported = model.state_dict()
    assert set(exported) == set(weights)
    assert max(plain.worst(weight, weights[name]) for name, weight in exported.items()) <= 1
    whole = [name for name in exported if "modules_to_save" in name]
    assert whole and all(plain.worst(exported[name], exported[_original(name)]) > 10 for name in whole)
    export.write(run.export, tmp_path / "merged", merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert (merged.get_output_embeddings().weight is merged.get_input_embeddings().weight) == tied
    tokens = torch.arange(30, 60)[None]
    with torch.no_grad():
        assert torch.allclose(merged(tokens).logits, model(tokens).logits, atol=1e-4, rtol=1e-4)
    alone, _ = plain.train(
        folder, conversations, SETTINGS, prepare=lambda model: adapters.add(model, LORA, recipe.seed)
    )
    with pytest.raises(AssertionError):
        gate.agree_on_steps(run, alone)


def _original(name):
    return name.replace("modules_to_save.default", "original_module")


def test_the_plan_counts_them_and_unknown_ones_are_refused(model_folder, conversations):
    sizes = read_json(model_folder / "config.json")
    matrix = sizes["vocab_size"] * sizes["hidden_size"]
    recipe = gate.recipe_for(SETTINGS, model_folder, conversations, "zero2.json")
    for tied, names, count in (
        (True, "embed_tokens", 1),
        (True, "lm_head", 1),
        (True, "embed_tokens,lm_head", 1),
        (False, "embed_tokens,lm_head", 2),
    ):
        model = replace(recipe.model, config=sizes | {"tie_word_embeddings": tied})
        lora = replace(LORA, modules_to_save=names)
        assert counts.saved_parameters(replace(recipe, model=model, lora=lora)) == count * matrix
    page = locate(overrides.apply(pages.find("tiny", "lora"), ["lora.modules_to_save=embed_tokens,hat"]))
    with pytest.raises(UserError, match=r"lora.modules_to_save=embed_tokens,hat: the model has no module hat"):
        counts.check_trained(preflight.with_dimensions(page))
    for modules in ("q_proj,hat", "proj"):
        page = locate(overrides.apply(pages.find("tiny", "lora"), [f"lora.target_modules={modules}"]))
        with pytest.raises(UserError, match=r"the model has no module (hat|proj); it has .*q_proj"):
            counts.check_trained(preflight.with_dimensions(page), ["lora.target_modules"])


def test_pipelines_refuse_them():
    with pytest.raises(UserError, match=r"embed_tokens with layout.pipeline=2: .*; leave lora.modules_to_save out"):
        overrides.apply(pages.find("tiny", "lora"), ["lora.modules_to_save=embed_tokens", "layout.pipeline=2"])
