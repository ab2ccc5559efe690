"""Reads and refuses new tokens, starts their rows, and counts them in plans."""

import contextlib
import json
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTJConfig, GPTJForCausalLM, Qwen3Config, Qwen3ForCausalLM

from deepspeed_recipes.launching import paths, preflight
from deepspeed_recipes.planning.model_profile import counts
from deepspeed_recipes.recipe import compatibility, deepspeed_file, new_tokens, overrides, pages
from deepspeed_recipes.recipe.conversions import from_dict, to_dict
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.new_tokens import NewToken
from deepspeed_recipes.recipe.project import CONFIGS
from deepspeed_recipes.recipe.recipe import Lora
from deepspeed_recipes.recipe.samples import TINY_MODEL
from deepspeed_recipes.training import export
from deepspeed_recipes.training.data import chat_templates
from deepspeed_recipes.training.model import load, untrained
from deepspeed_recipes.training.model import lora as adapters
from deepspeed_recipes.training.model import new_tokens as rows
from tests.small import small
from tests.test_whole import qwen3_5

ONE = (NewToken("<a>"), NewToken("<b>", special=True))


def with_tokens(text, variant="lora", *words):
    return overrides.apply(pages.find("tiny", variant), [f"model.new_tokens={text}", *words])


@pytest.mark.parametrize("kind", ["commas", "json", "txt", "file"])
def test_tokens_are_read_from_the_key_or_a_file(tmp_path, kind):
    listed = json.dumps(["<a>", {"content": "<b>", "special": True}])
    (tmp_path / "tokens.txt").write_text("<a>\n<b>\n")
    (tmp_path / "tokens.json").write_text(listed)
    text = {"commas": "<a>,<b>", "json": listed, "txt": tmp_path / "tokens.txt", "file": tmp_path / "tokens.json"}
    found = new_tokens.read(str(text[kind]))
    assert found == (ONE if kind in ("json", "file") else (ONE[0], NewToken("<b>")))
    assert new_tokens.read(new_tokens.as_text(found)) == found
    assert new_tokens.read("[PAD],[SEP]") == (NewToken("[PAD]"), NewToken("[SEP]"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<a>,<a>", r"=<a>,<a>: '<a>' is there twice; remove one of them"),
        ("<a>,,<b>", "token 2 is empty; remove it"),
        ("missing.txt", "missing.txt: no such file; name a text file with one token a line, or a JSON list"),
        ('["<a>",]', "not JSON: Expecting value"),
        ('{"<a>": 1}', "not a list; write"),
        ("[]", "names no token"),
        ("[1]", "1 is not a text; write it in quotes"),
        ('[{"content": "<a>", "specila": true}]', 'write {"content": "<a>", "special": true}'),
    ],
)
def test_mistakes_are_named(text, said):
    with pytest.raises(UserError, match=said):
        paths.locate(with_tokens(text))


def test_a_token_that_the_tokenizer_has_is_refused_before_a_rank_starts_and_on_the_ranks():
    recipe = paths.locate(with_tokens("<|end|>,<a>"))
    for check in (preflight.check_model, chat_templates.load_tokenizer):
        with pytest.raises(UserError, match=r"has '<\|end\|>' already; remove it from the list"):
            check(recipe)


def test_a_file_is_not_needed_after_the_launch(tmp_path):
    (tmp_path / "tokens.txt").write_text("<a>\n<b>\n")
    located = paths.locate(with_tokens(tmp_path / "tokens.txt"))
    assert located.model.new_tokens == '["<a>", "<b>"]' and from_dict(to_dict(located)) == located


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["layout.pipeline=2"], "new rows need both; leave model.new_tokens out"),
        (["layout.tensor=2"], "split matrices"),
        (["lora.target_modules=embed_tokens,q_proj"], "embed_tokens has adapters, beside which PEFT trains no rows"),
    ],
)
def test_what_cannot_have_new_rows_refuses_them(words, said):
    with pytest.raises(UserError, match=said):
        with_tokens("<a>", "lora", *words)


def test_a_plan_counts_the_rows():
    recipe = preflight.with_dimensions(paths.locate(with_tokens("<a>,<b>")))
    width = recipe.model.config["hidden_size"]
    assert counts.saved_parameters(recipe) == 2 * width  # tied
    apart = replace(recipe, model=replace(recipe.model, config={**recipe.model.config, "tie_word_embeddings": False}))
    assert counts.saved_parameters(apart) == 2 * 2 * width


def test_a_head_with_a_bias_is_refused_with_adapters(model_folder):
    model = GPTJForCausalLM(GPTJConfig(vocab_size=40, n_embd=16, n_layer=1, n_head=2, rotary_dim=4))
    with pytest.raises(UserError, match=r"the output head of gptj has a bias, .* train all weights \(variant full\)"):
        rows.trained_rows(model, Lora(), (39,))


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_is_not_the_embedding_has_rows_of_its_own(tied):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=40, **sizes, tie_word_embeddings=tied))
    found = rows.trained_rows(model, Lora(), (39,))
    assert found == ([39] if tied else {"embed_tokens": [39], "lm_head": [39]})
    kept = rows.trained_rows(model, Lora(modules_to_save="lm_head"), (39,))
    assert kept == ([] if tied else {"embed_tokens": [39]})


def test_peft_copies_an_embedding_to_train_a_row(model_folder):
    """Once this fails, `upstream.replace_rows_in_outputs` may not be needed; then try the parity test without it."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    theirs = get_peft_model(model, LoraConfig(target_modules=["q_proj"], trainable_token_indices=[5]))
    seen = []
    embedding = theirs.get_base_model().get_input_embeddings()
    embedding.token_adapter.base_layer.register_forward_hook(lambda *_: seen.append(1))
    tokens = torch.arange(8)[None]
    expected = theirs(tokens).logits
    assert not seen  # it calls no module that ZeRO-3 gathers
    ours = adapters.add(AutoModelForCausalLM.from_pretrained(model_folder), Lora(target_modules="q_proj"), rows=[5])
    assert torch.allclose(ours(tokens).logits, expected, atol=1e-5)
    head = ours.get_base_model().get_output_embeddings()
    with torch.no_grad():
        head.token_adapter.trainable_tokens_delta["default"].add_(1.0)
    with ours.disable_adapter():  # as the reference of DPO, whose loss in tiles reads the head's weight
        assert torch.equal(head.weight, head.original_module.weight)
        assert torch.allclose(ours(tokens).logits, expected, atol=1e-5)
    assert not torch.equal(head.weight, head.original_module.weight)


@pytest.mark.every
@pytest.mark.parametrize("lora", [None, Lora(rank=2)], ids=["full", "lora"])
def test_the_export_of_a_whole_checkpoint_has_tokens_and_rows(tmp_path, lora):
    base = qwen3_5(tmp_path / "base", AutoTokenizer.from_pretrained(TINY_MODEL))
    recipe = small(base, "unread", lora=lora)
    recipe = replace(recipe, model=replace(recipe.model, new_tokens="<a>,<b>"))
    tokenizer, model, folder = chat_templates.load_tokenizer(recipe), load.load_model(recipe), tmp_path / "export"
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad and ("trainable_tokens" in name or lora is None):
                weight.add_(0.01)
    model.save_pretrained(folder, **({"save_embedding_layers": False} if lora else {}))
    tokenizer.save_pretrained(folder)
    complete = untrained.name_adapter if lora else untrained.add
    complete(folder, str(base), "vocabulary", False)
    tokens = torch.arange(len(tokenizer) - 12, len(tokenizer))[None]
    with torch.no_grad():
        expected = model.eval()(tokens).logits
        export.write(folder, tmp_path / "copy", merge=lora is not None)
        for place in (folder, tmp_path / "copy"):
            assert torch.allclose(export.load(place).eval()(tokens).logits, expected, atol=1e-4)
            assert export.load_tokenizer(place).convert_tokens_to_ids("<b>") == len(tokenizer) - 1


def test_a_reference_has_no_new_rows_under_zero3():
    recipe = overrides.apply(pages.find("tiny", "dpo_lora"), ["model.new_tokens=<a>"])
    for stage in (2, 3):
        case = compatibility.Case(recipe, deepspeed_file.read(str(CONFIGS / f"zero{stage}.json")), 2)
        with pytest.raises(UserError, match=r"use deepspeed=zero2\.json") if stage == 3 else contextlib.nullcontext():
            compatibility.check(case, "run")
