"""A merged model computes what the adapter computes on its base model, also where head and embedding share a weight."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepspeed_recipes.prove import techniques
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.run_folder import read_json, write_json
from deepspeed_recipes.training import export

IDS = torch.arange(5, 25)[None]
ADAPTERS = {
    "inside": {"target_modules": ["q_proj"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"], "use_rslora": True},
    "dora": {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
    "saved_head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "saved_embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [7, 9]},
}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def base(request, tmp_path_factory):
    return techniques.random_qwen3(tmp_path_factory.mktemp("base"), tie_word_embeddings=request.param)


def trained(base, folder, settings):
    """Write an adapter with random values; return its logits on the base model."""
    loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = get_peft_model(loaded, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **settings))
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=random) * 0.05)
    adapted.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder)
    with torch.no_grad():
        return again.eval()(input_ids=IDS).logits


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_merged_model_has_the_adapters_logits(kind, base, tmp_path):
    expected = trained(base, tmp_path / "adapter", ADAPTERS[kind])
    for file in (tmp_path / "adapter").glob("*token*.json"):  # as plain PEFT saves an adapter
        file.unlink()
    export.write(tmp_path / "adapter", tmp_path / "merged", merge=True)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        found = plain(input_ids=IDS).logits
    assert (found - expected).abs().max() / expected.abs().max() < 1e-4
    tied = [read_json(folder / "config.json")["tie_word_embeddings"] for folder in (base, tmp_path / "merged")]
    assert tied[1] == (tied[0] and kind in ("inside", "tokens")), "an adapter on one of them makes two weights of one"


@pytest.mark.filterwarnings("ignore")
def test_a_merge_into_the_shared_weight_is_noticed(tmp_path, monkeypatch):
    base = techniques.random_qwen3(tmp_path / "base")
    trained(base, tmp_path / "adapter", ADAPTERS["embedding"])
    monkeypatch.setattr(export, "_part_tied", lambda model: None)
    with pytest.raises(RuntimeError, match="merged, its logits differ"):
        export.write(tmp_path / "adapter", tmp_path / "merged", merge=True)
    assert not (tmp_path / "merged").exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("saved", [None, ["embed_tokens"], ["embed_tokens", "lm_head"]])
def test_an_adapter_on_a_larger_vocabulary_is_merged_with_its_rows(base, saved, tmp_path):
    larger = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    larger.resize_token_embeddings(larger.config.vocab_size + 3)
    adapted = get_peft_model(larger, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=saved))
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    export.write(tmp_path / "adapter", tmp_path / "merged", merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        found, expected = (model.eval()(input_ids=IDS).logits for model in (merged, adapted))
    assert found.shape == expected.shape and (found - expected).abs().max() / expected.abs().max() < 1e-4


WRONG = {
    "half of it": ({}, lambda held: dict(list(held.items())[::2]), {}, "tensors the file lacks (2, such as"),
    "more than it": (
        {},
        lambda held: held | {"base_model.model.x.lora_A.weight": held[next(iter(held))].clone()},
        {},
        "(1, ",
    ),
    "fewer layers": ({}, None, {"layers_to_transform": [1]}, "tensors without a place in"),
    "more layers": ({}, None, {"target_modules": ["q_proj", "o_proj"]}, "tensors the file lacks (4, "),
    "another rank": ({}, None, {"r": 8}, "size mismatch for base_model.model.model.layers.0"),
    "no scale": ({}, None, {"lora_alpha": None}, "PEFT cannot put this adapter on"),
    "an unknown kind": ({}, None, {"peft_type": "MINE"}, "KeyError: 'MINE'"),
    "no base": ({}, None, {"base_model_name_or_path": None}, "base_model_name_or_path=None: write the folder or"),
    "not finite": (
        {},
        lambda held: {name: one / 0 for name, one in held.items()},
        {},
        "has values that are not finite",
    ),
    "some tokens": ({"alora_invocation_tokens": [5]}, None, {}, "it acts on some tokens only"),
    "at random": ({"init_lora_weights": "pissa_niter_4"}, None, {}, "takes a random part of the base model away"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", WRONG)
def test_an_adapter_that_does_not_fit_is_refused_in_a_line(kind, tmp_path):
    settings, damaged, changes, said = WRONG[kind]
    folder = tmp_path / "adapter"
    trained(techniques.random_qwen3(tmp_path / "base"), folder, {"target_modules": ["q_proj"], **settings})
    write_json(folder / "adapter_config.json", read_json(folder / "adapter_config.json") | changes)
    if damaged:
        save_file(damaged(load_file(folder / "adapter_model.safetensors")), folder / "adapter_model.safetensors")
    with pytest.raises(UserError) as caught:
        export.write(folder, tmp_path / "merged", merge=True)
    assert str(caught.value).startswith(str(folder)) and said in str(caught.value)
    assert "\n" not in str(caught.value) and not (tmp_path / "merged").exists()
