"""Packing: whether a family's code keeps documents apart is checked on a draft, and the run acts on it."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, modeling_flash_attention_utils

from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.layout import per_layer
from deepspeed_recipes.recipe.recipe import Draft, Model
from deepspeed_recipes.training.model import draft, load, probe
from tests.small import language_families, small

SIZES = [(family, size) for family in language_families() for size in pages.page(family).SIZES]
CROSSING = {"bloom", "falcon_h1", "gpt_oss", "lfm2", "nemotron_h", "qwen3_5", "qwen3_5_moe"}
"""Families whose code does not tell documents apart by their position ids; the pages of these do not pack."""


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(draft.TINY_MODEL)


def test_families_are_found():
    assert len(pages.families()) >= 18 and {family for family, _ in SIZES} > CROSSING


@pytest.mark.parametrize(("family", "size"), SIZES)
def test_packed_documents_have_the_logits_of_each_alone_or_the_page_does_not_pack(tokenizer, family, size):
    recipe = pages.page(family).full(size)
    config = AutoConfig.for_model(**recipe.model.config)
    model = probe.draft_of(config, tokenizer, recipe.model.attention, torch.float32)
    crossing = probe.leak(model)
    assert crossing < 1e-5 or crossing > 0.1, "no doubt is left either way"
    assert (crossing > 0.1) == (family in CROSSING)
    for variant in pages.variants(pages.page(family)):
        packs = pages.build(pages.page(family), size, variant).packing
        assert not (packs and family in CROSSING), variant


def test_a_cache_lets_documents_attend_to_each_other_and_the_check_notices(tokenizer):
    config = AutoConfig.for_model(**pages.page("llama3").SIZES["1b"].config)
    model = probe.draft_of(config, tokenizer, "sdpa", torch.float32)
    model.config.use_cache = True
    assert probe.leak(model) > 0.1


def lowered(tokenizer, kind):
    """Return the integers of a configuration that bound attention, as found by trying."""
    small = draft.shrink(AutoConfig.for_model(kind), Draft(layers=4), tokenizer)
    bounded = probe._within(small, draft.WINDOW)
    before, after = small.to_dict(), bounded.to_dict()
    return {name: after[name] for name in before if before[name] != after[name]}


def test_what_bounds_attention_is_found_under_any_name(tokenizer):
    assert lowered(tokenizer, "llama4_text") == {"attention_chunk_size": draft.WINDOW, "floor_scale": draft.WINDOW}
    assert lowered(tokenizer, "gpt_neo") == {"window_size": draft.WINDOW}
    assert lowered(tokenizer, "llama") == lowered(tokenizer, "phi3") == {}, "positions and widths bound nothing"


def test_what_bounds_attention_is_found_in_logits_of_any_size(tokenizer, monkeypatch):
    logits = probe._logits
    monkeypatch.setattr(probe, "_logits", lambda config, tokens: logits(config, tokens) / 1000)
    assert lowered(tokenizer, "gpt_neo") == {"window_size": draft.WINDOW}


def test_packing_is_refused_where_chunks_begin_elsewhere_than_documents(tmp_path, tokenizer, conversations):
    """Llama 4: its chunks are counted from a sequence's begin, whatever document it is in."""
    config = AutoConfig.for_model("llama4_text")
    config.save_pretrained(tmp_path)
    asked = replace(small(tmp_path, conversations, packing=True), model=Model(str(tmp_path)))
    with pytest.raises(UserError, match=r"packing=true: in llama4_text.*attend to each other; add packing=false"):
        probe.check_packing(asked, tokenizer)


def test_packing_is_refused_where_documents_attend_to_each_other(tmp_path, tokenizer, conversations):
    recipe = pages.page("bloom").full("560m")
    draft.write(recipe, tmp_path, torch.float32)
    asked = replace(small(tmp_path, conversations, packing=True), model=Model(str(tmp_path), attention="eager"))
    with pytest.raises(UserError, match=r"packing=true: in bloom.*attend to each other; add packing=false"):
        probe.check_packing(asked, tokenizer)
    probe.check_packing(replace(asked, packing=False), tokenizer)
    probe.check_packing(replace(asked, method="dpo"), tokenizer)


@pytest.mark.parametrize("packing", [True, False])
def test_a_model_whose_tokens_see_later_ones_is_not_trained_to_write(tmp_path, tokenizer, conversations, packing):
    """BERT is loaded as a model that writes, with a warning; its loss would fall by copying."""
    asked = replace(small(tmp_path, conversations, packing=packing), model=Model(str(tmp_path)))
    AutoConfig.for_model("bert").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"tokens of bert attend to later ones.*\nuse classify or embed, or set is_dec"):
        probe.check_packing(asked, tokenizer)
    AutoConfig.for_model("bert", is_decoder=True).save_pretrained(tmp_path)
    probe.check_packing(replace(asked, packing=False), tokenizer)
    AutoConfig.for_model("gpt_neox").save_pretrained(tmp_path)  # its is_decoder is false, and it always writes
    probe.check_packing(replace(asked, packing=False), tokenizer)


def test_a_model_class_that_cannot_be_checked_is_refused_too(tmp_path, tokenizer, conversations):
    draft.write(pages.page("llama3").full("1b"), tmp_path, torch.float32)
    asked = replace(small(tmp_path, conversations, packing=True), model=Model(str(tmp_path), attention="nonsense"))
    with pytest.raises(UserError, match=r"cannot be checked on a shrunken llama.*\nAdd packing=false"):
        probe.check_packing(asked, tokenizer)


def test_a_kernel_without_a_backward_pass_is_noticed(tokenizer, monkeypatch):
    config = AutoConfig.for_model(**pages.page("llama3").SIZES["1b"].config)
    model = probe.draft_of(config, tokenizer, "sdpa", torch.float32)
    probe.check_gradients(model)
    model.model.norm.register_full_backward_hook(lambda module, into, out: (into[0] * float("nan"),))
    with pytest.raises(ArithmeticError, match="not finite"):
        probe.check_gradients(model)


@pytest.mark.parametrize("packs", [True, False], ids=["packed", "single"])
@pytest.mark.parametrize("name", ["flash_attention_3", "kernels-community/flash-attn3"])
def test_an_attention_that_is_not_installed_is_named(tokenizer, model_folder, conversations, monkeypatch, name, packs):
    # transformers takes what failed to load once for loaded
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    recipe = small(model_folder, conversations, packing=packs)
    recipe = replace(recipe, model=replace(recipe.model, attention=name))
    with pytest.raises(UserError, match=rf"^model\.attention={name}: .*nstall.*\nInstall it, or use model"):
        probe.check_packing(recipe, tokenizer) if packs else load.load_model(recipe)


def test_lists_of_numbers_that_belong_to_no_layer_stay_whole(tokenizer):
    """Falcon-H1 has lists of two and of five numbers."""
    two = draft.shrink(AutoConfig.for_model("falcon_h1"), Draft(layers=2), tokenizer)
    for layers in (4, 5):
        more = draft.shrink(two, Draft(layers=layers), tokenizer)
        assert more.num_hidden_layers == layers
        assert list(more.time_step_limit) == [0.0, float("inf")] and len(more.ssm_multipliers) == 5
    assert len(draft.shrink(more, Draft(layers=2), tokenizer).ssm_multipliers) == 5
    assert per_layer({"activation_sparsity_pattern": [0.95, 0.0], "mlp_multipliers": [1.0, 2.0]}, 2) == [
        "activation_sparsity_pattern"
    ]
