"""Decoders inside other models, and those that transformers has under another name."""

import json

import pytest

from deepspeed_recipes.commands import main
from deepspeed_recipes.planning.model_profile import decoders, lookup
from deepspeed_recipes.planning.search import model_recipe
from deepspeed_recipes.recipe.errors import UserError
from tests.tiers import tiered

LLAMA_LIKE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 8192,
}
VISION = {"hidden_size": 64, "depth": 2}
CONFIGS = {
    "internlm2": LLAMA_LIKE
    | {
        "model_type": "internlm2",
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
        "auto_map": {"AutoConfig": "a.B"},
    },
    "qwen2_5_vl": LLAMA_LIKE
    | {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
        "vision_config": VISION,
    },
    "mllama": {
        "model_type": "mllama",
        "architectures": ["MllamaForConditionalGeneration"],
        "vision_config": VISION,
        "text_config": LLAMA_LIKE | {"model_type": "mllama_text_model", "cross_attention_layers": [1]},
    },
    "kimi_k2": {
        "model_type": "kimi_k2",
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 512,
        "intermediate_size": 1024,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "vocab_size": 1000,
        "max_position_embeddings": 8192,
    },
}
KNOWN = {"internlm2": "llama", "qwen2_5_vl": "qwen2", "mllama": "llama", "kimi_k2": "deepseek_v3"}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def written(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder / "config.json")


@pytest.mark.parametrize("name", tiered(CONFIGS, {"mllama"}))
def test_it_is_planned_as_what_has_the_same_layers(name, tmp_path, printed_by):
    config = CONFIGS[name]
    shown = printed_by("plan", written(tmp_path, config), "lora", "--gpu", "H100", "--gpus", "8")
    assert f"is planned as {KNOWN[name]}, which has the same layers" in " ".join(shown.split())
    assert ("are not counted" in " ".join(shown.split())) == ("vision_config" in config)


def test_the_parameters_are_the_decoders():
    """Queries, keys and values in one matrix or three: InternLM2's `wqkv` has (8 + 2 x 2) x 64 outputs."""
    profile = lookup.profile_of(decoders.decoder_of(CONFIGS["internlm2"]))
    layer = 512 * (8 + 2 * 2) * 64 + 512 * 512 + 3 * 512 * 1024 + 2 * 512
    assert profile.parameters == 4 * layer + 2 * 1000 * 512 + 512


def test_it_is_not_launched_but_with_a_page(tmp_path):
    with pytest.raises(UserError, match=r"transformers has no decoder internlm2; ds-recipes plan accepts it"):
        model_recipe.find(written(tmp_path, CONFIGS["internlm2"]), "lora", to_launch=True)
    with pytest.raises(
        UserError, match=r"no decoder qwen2_5_vl; .* ds-recipes launch qwen2_5_vl-3b lora model\.path=/"
    ):
        model_recipe.find(written(tmp_path, CONFIGS["qwen2_5_vl"]), "lora", to_launch=True)


def test_the_answer_as_data_says_what_is_left_out(tmp_path, printed_by):
    words = [written(tmp_path, CONFIGS["mllama"]), "--gpu", "H100", "--gpus", "8", "--json"]
    assert "tower" in json.loads(printed_by("plan", *words))["model"]["remark"]


def test_a_page_has_no_remark():
    assert model_recipe.remark("gemma3-4b") is None


@pytest.mark.every
def test_adapters_on_a_mamba_hybrid_leave_out_what_peft_refuses(tmp_path, capsys):
    config = {
        "model_type": "falcon_h1",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1000,
        "mamba_d_ssm": 256,
        "mamba_n_heads": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 32,
        "mamba_n_groups": 1,
        "max_position_embeddings": 8192,
    }
    assert main.run("plan", [written(tmp_path, config), "lora", "--gpu", "H100"]) == 0
    assert "Mamba" not in capsys.readouterr().err
