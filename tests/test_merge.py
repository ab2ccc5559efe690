"""A merged model computes what the adapter computes on its base model, also where head and embedding share a weight."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepspeed_recipes.prove import techniques
from deepspeed_recipes.recipe.run_folder import read_json
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
