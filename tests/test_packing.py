"""Packing: whether a family's code keeps documents apart is checked on a draft, and the run acts on it.

The variable-length kernel as each torch version declares it: the same attention, or a reason.

The kernel itself needs a GPU. Here functions with exactly its signatures compute what it computes, on a CPU.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoTokenizer, modeling_flash_attention_utils

from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.layout import per_layer
from deepspeed_recipes.recipe.recipe import Draft, Model
from deepspeed_recipes.training.model import attention, draft, load, probe
from tests.small import language_families, small
from tests.versions import needs

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
    asked = replace(small(tmp_path, conversations, packing=True), model=Model(str(tmp_path)))
    asked = replace(asked, model=replace(asked.model, attention="nonsense", trust_remote_code=True))
    with pytest.raises(UserError, match=r"cannot be checked on a shrunken llama.*\nAdd packing=false"):
        probe.check_packing(asked, tokenizer)


def test_a_kernel_without_a_backward_pass_is_noticed(tokenizer, monkeypatch):
    config = AutoConfig.for_model(**pages.page("llama3").SIZES["1b"].config)
    model = probe.draft_of(config, tokenizer, "sdpa", torch.float32)
    monkeypatch.setattr(probe, "draft_of", lambda *given: model)
    monkeypatch.setattr(probe, "check_dtype", lambda name: torch.bfloat16)
    assert probe.keeps_documents_apart(config, tokenizer, "sdpa")
    model.model.norm.register_full_backward_hook(lambda module, into, out: (into[0] * float("nan"),))
    with pytest.raises(ArithmeticError, match="not finite"):
        probe.keeps_documents_apart(config, tokenizer, "sdpa")


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


STARTS = torch.tensor([0, 5, 12], dtype=torch.int32)


def computed(query, key, value, starts, scale, window, causal=True):
    """Return attention within documents, masked densely, for as many key heads as query heads."""
    mask = torch.full((len(query), len(query)), False)
    for start, end in pairwise(starts.tolist()):
        mask[start:end, start:end] = True
    back = torch.arange(len(query))[:, None] - torch.arange(len(query))
    mask &= (back >= 0) | torch.tensor(not causal)
    if window[0] >= 0:
        mask &= back <= window[0]
    query, key, value = (one.transpose(0, 1)[None] for one in (query, key, value))
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)[0].transpose(0, 1)


def torch_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    assert key.shape == query.shape
    return computed(query, key, value, cu_seq_q, None, (-1, -1), is_causal)


def torch_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    assert key.shape == query.shape
    return computed(query, key, value, cu_seq_q, scale, window_size, causal=window_size[1] == 0)


def torch_2_13(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k,
    *, return_aux=None, scale=None, window_size=(-1, -1), enable_gqa=False,
):  # fmt: skip
    groups = query.shape[1] // key.shape[1]
    assert enable_gqa == (groups > 1)
    key, value = (one.repeat_interleave(groups, dim=1) for one in (key, value))
    return torch_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)


def inputs(key_heads):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(12, heads, 8, generator=generator) for heads in (4, key_heads, key_heads))


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("kernel", [torch_2_10, torch_2_11, torch_2_13])
def test_every_version_computes_the_same(monkeypatch, kernel, key_heads, scale):
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    options = {"scale": scale, "window_size": (-1, 0), "enable_gqa": key_heads != 4}
    ours = attention._fused(*inputs(key_heads), STARTS, 7, **options)
    torch.testing.assert_close(ours, attention._one_by_one(*inputs(key_heads), STARTS, 7, **options))


def test_windows_are_kept_or_refused(monkeypatch):
    options = {"scale": None, "window_size": (2, 0), "enable_gqa": False}
    monkeypatch.setattr(attention, "varlen_attn", torch_2_11)
    ours = attention._fused(*inputs(4), STARTS, 7, **options)
    torch.testing.assert_close(ours, attention._one_by_one(*inputs(4), STARTS, 7, **options))
    monkeypatch.setattr(attention, "varlen_attn", torch_2_10)
    with pytest.raises(ValueError, match="no sliding windows"):
        attention._fused(*inputs(4), STARTS, 7, **options)


@pytest.fixture
def recipe(monkeypatch, model_folder, conversations):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    return small(model_folder, conversations, packing=True, precision="bf16")


@needs("torch>=2.10")
def test_without_the_kernel_the_next_one_is_taken(monkeypatch, recipe):
    config = AutoConfig.from_pretrained(recipe.model.path)
    assert attention.candidates(recipe, config, on_gpu=True)[0] == "varlen"
    monkeypatch.setattr(attention, "varlen_attn", None)
    assert attention.candidates(recipe, config, on_gpu=True)[0] == "flex_attention"
    for without_heads in ("mamba", "mamba2"):
        config = AutoConfig.for_model(without_heads)
        assert attention.candidates(recipe, config, on_gpu=True)[0] in ("sdpa", "eager")


def test_a_refused_kernel_is_named_with_the_reason(monkeypatch, recipe):
    def too_old(*_, **__):
        raise TypeError("varlen_attn() got an unexpected keyword argument 'enable_gqa'\nmore")

    monkeypatch.setattr(attention, "_one_by_one", too_old)
    monkeypatch.setattr(attention, "candidates", lambda *_: ["varlen", "sdpa"])  # flex attention is slow on a CPU
    said = []
    tokenizer = AutoTokenizer.from_pretrained(recipe.model.path)
    assert probe.check_packing(recipe, tokenizer, on_gpu=True, say=said.append) == "sdpa"
    reason = "TypeError: varlen_attn() got an unexpected keyword argument 'enable_gqa'"
    assert said[0] == f"model.attention: not varlen in qwen3 ({reason})"
