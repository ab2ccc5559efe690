"""Architectures that no page has: drafts of them compute; what a technique cannot do with them is said in a line."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
)

from deepspeed_recipes.recipe import deepspeed_file, limits
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.recipe import Draft, Layout, Model
from deepspeed_recipes.training import run
from deepspeed_recipes.training.arguments import deepspeed_config
from deepspeed_recipes.training.model import draft, load, probe
from deepspeed_recipes.training.parallel import expert, sequence, stages
from tests import ROOT
from tests.small import small
from tests.versions import needs

has_autoep = needs("deepspeed>=0.19.2")

DRAFTED = ["codegen", "ernie4_5_moe", "gptj", "llava", "mamba", "opt", "rwkv", "xglm"]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(draft.TINY_MODEL)


def recipe_for(folder, kind, **changes):
    """Return a recipe for a model of a kind; its folder has a configuration only."""
    AutoConfig.for_model(kind).save_pretrained(folder)
    return replace(small(folder, folder / "data.jsonl"), model=Model(str(folder)), **changes)


@pytest.mark.parametrize("kind", DRAFTED)
def test_a_draft_computes(tokenizer, kind):
    config = draft.shrink(AutoConfig.for_model(kind), Draft(layers=2), tokenizer)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        logits = model(input_ids=torch.arange(5, 25)[None], use_cache=False).logits
    assert logits.shape == (1, 20, len(tokenizer)) and logits.isfinite().all()
    assert model.num_parameters() < 10**6, "or not every width has shrunk"


def test_narrower_layers_get_larger_weights_under_any_name(tokenizer):
    opt = AutoConfig.for_model("opt")
    small = draft.shrink(opt, Draft(hidden_size=48), tokenizer)
    assert small.init_std == pytest.approx(opt.init_std * math.sqrt(opt.hidden_size / 48))


def test_rotary_dimensions_fit_the_narrower_head(tokenizer):
    small = draft.shrink(AutoConfig.for_model("deepseek_v3"), Draft(), tokenizer)
    assert small.head_dim == small.qk_rope_head_dim == small.qk_nope_head_dim // 2
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    pictures = AutoConfig.for_model("qwen2_5_vl_text", rope_parameters=rope)
    for width, sections in ((64, [4, 2, 2]), (96, [4, 4, 4])):
        small = draft.shrink(pictures, Draft(hidden_size=width), tokenizer)
        assert small.rope_parameters["mrope_section"] == sections


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("kind", [pytest.param("gemma2", marks=needs("transformers>=5.20")), "gptj", "llama"])
def test_a_model_without_sdpa_takes_eager_attention_and_says_so(alone, tmp_path, tokenizer, capsys, kind, packing):
    recipe = recipe_for(tmp_path, kind, packing=packing)
    found = run.checked(recipe, deepspeed_file.read(recipe.deepspeed), tokenizer)
    eager = kind != "llama"
    assert found.model.attention == ("eager" if eager else "sdpa")
    said = capsys.readouterr().out
    assert said == (f"model.attention=eager: transformers has no SDPA for {kind}\n" if eager else "")


def test_experts_are_counted_under_any_name(tmp_path, tokenizer):
    file = deepspeed_file.read(ROOT / "configs" / "expert_parallel.json")
    recipe = recipe_for(tmp_path, "ernie4_5_moe", layout=Layout(expert=3))
    recipe = replace(recipe, model=replace(recipe.model, config=AutoConfig.for_model("ernie4_5_moe").to_dict()))
    assert "has no experts" not in limits.limit(recipe, 3, file)
    assert draft.shrink(AutoConfig.for_model("ernie4_5_moe"), Draft(), tokenizer).num_experts == draft.DRAFT_EXPERTS


@pytest.mark.parametrize("kind", ["mamba", "rwkv"])
def test_sequence_parallelism_needs_attention(tmp_path, tokenizer, kind):
    with pytest.raises(
        UserError, match=rf"layout\.sequence=2: {kind} has no attention heads .* leave layout\.sequence"
    ):
        sequence.check(recipe_for(tmp_path, kind, layout=Layout(sequence=2)), tokenizer)


def test_stages_need_a_language_model(tmp_path, tokenizer):
    with pytest.raises(UserError, match=r"layout\.pipeline=2: llava is not a language model .* layout\.pipeline=1"):
        stages.check(recipe_for(tmp_path, "llava", layout=Layout(pipeline=2)), tokenizer)


EXPERT_FILE = deepspeed_file.read(ROOT / "configs" / "expert_parallel.json")
WITHOUT_PRESET = {"glm4_moe": True, "minimax": False, "minimax_m2": False, "olmoe": False, "qwen3_next": False}
"""Mixtures that DeepSpeed has no preset for, and whether their routers compute in fp32."""


@pytest.mark.parametrize("kind", WITHOUT_PRESET)
@has_autoep
def test_autoep_is_told_how_a_mixture_computes(tmp_path, tokenizer, kind):
    recipe = recipe_for(tmp_path, kind, layout=Layout(expert=2))
    known = replace(recipe, model=replace(recipe.model, config=AutoConfig.for_model(kind).to_dict()))
    assert limits.limit(known, 2, EXPERT_FILE) is None
    found = expert.mixture(recipe)
    assert found.routes_in_fp32 == WITHOUT_PRESET[kind]
    assert deepspeed_config(recipe, EXPERT_FILE)["expert_parallel"] == {
        "enabled": True,
        "autoep_size": 2,
        **found.keys,
    }
    whole = probe.draft_of(AutoConfig.for_model(kind), tokenizer, "eager", torch.float32)
    layers = len(expert.blocks(whole))
    assert expert.difference(whole, found.keys, layers) < 1e-5
    for wrong in ({"route_norm": not found.keys["route_norm"]}, {"top_k": 1}):
        assert expert.difference(whole, {**found.keys, **wrong}, layers) > 1e-2, wrong


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("ernie4_5_moe", "does not compute ernie4_5_moe's experts as transformers does"),
        ("gpt_oss", "clamp their SwiGLU"),
        ("phimoe", "a shrunken model differs by"),
        ("llama", "finds no layers of experts in llama"),
    ],
)
@has_autoep
def test_autoep_is_refused_where_it_computes_something_else(kind, why):
    with pytest.raises(UserError, match=rf"layout\.expert: .*{why}.*use layout\.expert=1\.$"):
        expert.find(AutoConfig.for_model(kind))


@has_autoep
def test_corrections_that_are_the_blocks_own_count(monkeypatch):
    """MiniMax M2 corrects its router by a buffer beside it; AutoEP without that computes another model."""
    from deepspeed.module_inject import auto_ep

    config = AutoConfig.for_model("minimax_m2")
    assert expert.find(config).keys
    monkeypatch.setattr(auto_ep, "_resolve_e_score_correction_bias_path", lambda module, name: None)
    with pytest.raises(UserError, match=r"layout\.expert: .*a shrunken model differs by"):
        expert.find(config)


@has_autoep
def test_autoep_without_a_preset_has_no_balancing_loss(tmp_path):
    recipe = recipe_for(tmp_path, "olmoe", layout=Layout(expert=2), router_aux_loss_coef=0.01)
    with pytest.raises(UserError, match=r"router_aux_loss_coef=0\.01: .* set it to 0"):
        expert.mixture(recipe)


@pytest.mark.parametrize("tied", [True, False])
def test_the_text_part_of_a_checkpoint_that_also_sees_is_loaded_alone(tmp_path, tokenizer, tied):
    """Mistral 3's checkpoints, of which Ministral 3's are some: transformers has a class for their text part alone."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
    }
    text = AutoConfig.for_model(
        "ministral3", **sizes, num_key_value_heads=1, vocab_size=len(tokenizer), tie_word_embeddings=tied
    )
    seeing = AutoConfig.for_model("pixtral", **sizes, image_size=28, patch_size=14)
    config = Mistral3Config(text_config=text, vision_config=seeing, tie_word_embeddings=tied)
    whole = Mistral3ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path)
    loaded = load.load_base(replace(small(tmp_path, "unread"), model=Model(str(tmp_path)))).eval()
    assert type(loaded).__name__ == "Ministral3ForCausalLM" and loaded.config.model_type == "ministral3"
    tokens = torch.arange(5, 25)[None]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=tokens).logits, whole(input_ids=tokens).logits)
