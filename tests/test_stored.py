"""What a model's files hold: every tensor becomes a weight, is named, or is refused with the file and the fix.

The comparison of pages with the Hub, on a local folder of the same form; these tests use no network.
"""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer
from transformers.utils.quantization_config import QuantizationMethod

from deepspeed_recipes.commands import page
from deepspeed_recipes.export import shrink
from deepspeed_recipes.launching import preflight
from deepspeed_recipes.planning.model_profile import decoders
from deepspeed_recipes.planning.search import model_recipe
from deepspeed_recipes.prove import techniques
from deepspeed_recipes.prove.techniques import small
from deepspeed_recipes.recipe import pages, quantization
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.run_folder import read_json, write_json
from deepspeed_recipes.recipe.samples import TINY_VISION
from deepspeed_recipes.training import export
from deepspeed_recipes.training.data import chat_templates, tokenize
from deepspeed_recipes.training.model import load, stored
from deepspeed_recipes.training.model_folder import base_model, weights
from deepspeed_recipes.training.parallel import stages

DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return techniques.random_qwen3(tmp_path_factory.mktemp("made"), tie_word_embeddings=False)


@pytest.fixture
def model(made, tmp_path):
    return shutil.copytree(made, tmp_path / "model")


def rewrite(folder, change):
    """Replace a folder's tensors by what `change` makes of them."""
    tensors = load_file(folder / weights.WHOLE)
    change(tensors)
    save_file(tensors, folder / weights.WHOLE, metadata={"format": "pt"})


def shard(folder, **index):
    """Split a folder's file in two and write an index with these keys beside the map; return the map."""
    tensors = load_file(folder / weights.WHOLE)
    (folder / weights.WHOLE).unlink()
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, folder / file, metadata={"format": "pt"})
    found = {name: file for file, held in files.items() for name in held}
    write_json(folder / weights.INDEX, {"weight_map": found} | index)
    return found


def refused(folder, *words):
    """Expect that the launcher and the ranks refuse a folder, with these words."""
    for attempt in (
        lambda: preflight.check_model(small(folder, "unread")),
        lambda: load.load_model(small(folder, "unread")),
    ):
        with pytest.raises(UserError) as caught:
            attempt()
        text = str(caught.value)
        assert str(folder) in text and all(word in text for word in words) and len(text.splitlines()) == 1, text


NAMED_ABOVE = {"fp8", "compressed-tensors", "bitsandbytes", "gptq", "mxfp4", "torchao"}
STATED = {
    "compressed-tensors, marlin-24": {
        "quant_method": "compressed-tensors",
        "format": "marlin-24",
        "config_groups": {"group_0": {}},
    },
    "bitsandbytes, 8 bits": {"load_in_8bit": True, "quant_method": "bitsandbytes"},
    "bitsandbytes, 4 bits": {"load_in_4bit": True},
    "gptq": {"quant_method": "gptq", "bits": 4},
    "mxfp4": {"quant_method": "mxfp4"},
    "torchao": {"quant_method": "torchao"},
    **{method: {"quant_method": method} for method in sorted({one.value for one in QuantizationMethod} - NAMED_ABOVE)},
}


@pytest.mark.parametrize("name", STATED)
def test_a_quantisation_that_the_configuration_states_is_refused_by_name(name, model):
    for key in ("quantization_config", "compression_config"):
        config = {key: value for key, value in read_json(model / "config.json").items() if "_config" not in key}
        write_json(model / "config.json", config | {key: STATED[name]})
        with pytest.raises(UserError, match=rf"quantised \({name}\)"):
            preflight.check_model(small(model, "unread"))
    assert name in decoders.remark(read_json(model / "config.json"))
    with pytest.raises(UserError, match=rf"quantised \({name}\)"):
        load.load_model(small(model, "unread"))


def test_what_is_dequantised_is_not_refused_and_nothing_stated_is_nothing_refused():
    assert quantization.stated({"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}) is None
    nested = {"text_config": {"quantization_config": {"quant_method": "fp8"}}}
    assert quantization.stated(nested) is None and "published as fp8, and counted" in decoders.remark(nested)
    packed = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {}}}
    assert quantization.stated({"quantization_config": packed}) is None
    sparse = packed | {"sparsity_config": {"format": "sparse-24-bitmask"}}
    assert quantization.stated({"quantization_config": sparse}) == "compressed-tensors, pack-quantized"
    for nothing in ({}, {"quantization_config": None}, {"quantization_config": {}}):
        assert quantization.stated(nothing) is None
    for part in ("text_config", "llm_config"):
        assert quantization.stated({part: {"quantization_config": {"quant_method": "awq"}}}) == "awq"


def fp8(tensors):
    tensors[DOWN] = tensors[DOWN].to(torch.float8_e4m3fn)


def int8(tensors):
    tensors[DOWN] = tensors[DOWN].to(torch.int8)


@pytest.mark.parametrize("change", [fp8, int8], ids=lambda change: change.__name__)
def test_weights_of_8_bits_are_refused_whatever_the_configuration_says(change, model):
    rewrite(model, change)
    refused(model, DOWN, "F8_E4M3" if change is fp8 else "I8")


@pytest.mark.parametrize(
    "name",
    (
        *("weight_scale_inv", "weight_scale", "qweight", "weight.absmax", "SCB", "weight_packed"),
        *("weight.quant_state.nf4", "codebooks", "codes", "centroids.weight", "indices", "dense_weights", "tables"),
    ),
)
def test_what_lies_beside_quantised_weights_is_refused_without_a_configuration(name, model):
    rewrite(model, lambda tensors: tensors.update({DOWN.replace("weight", name): torch.ones(1)}))
    refused(model, name, "quantised")


def test_a_tensor_without_a_place_in_a_layer_is_refused(model):
    left = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"  # of a merge
    for name in ("model.layers.0.self_attn.q_proj.bias", "model.layers.1.extra.weight", "model.norm.offset", left):
        rewrite(model, lambda tensors, name=name: tensors.update({name: torch.ones(64)}))
        with pytest.raises(UserError, match=name):
            load.load_model(small(model, "unread"))
        rewrite(model, lambda tensors, name=name: tensors.pop(name))
    assert load.load_model(small(model, "unread"))


def test_a_head_beside_a_tied_embedding_is_refused_unless_it_is_the_same(model):
    config = read_json(model / "config.json")
    write_json(model / "config.json", config | {"tie_word_embeddings": True})
    with pytest.raises(UserError, match=r"tie_word_embeddings=true, but the files hold a lm_head\.weight"):
        load.load_model(small(model, "unread"))
    rewrite(model, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert load.load_model(small(model, "unread"))


def test_parts_that_are_not_loaded_are_named_and_what_follows_from_the_configuration_is_not(model):
    others = ("mtp.layers.0.norm.weight", "model.visual.patch.weight", "model.layers.2.norm.weight")
    others += ("model.layers.3.eh_proj.weight", "model.layers.3.mlp.gate.weight")  # as DeepSeek's and GLM's
    old = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(model, lambda tensors: tensors.update({name: torch.ones(2) for name in (*others, old)}))
    loaded = load.load_model(small(model, "unread"))
    assert set(stored.check(str(model), loaded)) == {"mtp", "model.visual", "model.layers.2", "model.layers.3"}
    assert set(stored.MTP[str(model)]) == {"mtp", "model.layers.3"}
    assert stored.NOT_LOADED[str(model)] == stored.check(str(model), loaded), "for summary.json and the report"


@pytest.mark.parametrize("metadata", [{}, {"metadata": None}], ids=["absent", "null"])
def test_an_index_needs_no_metadata(metadata, model, made):
    shard(model, **metadata)
    preflight.check_model(small(model, "unread"))
    loaded = load.load_model(small(model, "unread")).state_dict()
    expected = load_file(made / weights.WHOLE)
    assert set(expected) <= set(loaded) and all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_an_index_that_does_not_fit_its_files_is_refused(model):
    found = shard(model, metadata={})
    first, second = sorted(set(found.values()))
    for wrong, words in (
        ({}, "no weight_map"),
        ({**found, DOWN: "../outside.safetensors"}, "'../outside.safetensors'"),
        ({**found, DOWN: "pytorch_model.bin"}, "'pytorch_model.bin'"),
        ({**found, DOWN: "model-00003-of-00003.safetensors"}, "model-00003-of-00003.safetensors: does not exist"),
        ({**found, "model.layers.7.absent": first}, "names model.layers.7.absent"),
    ):
        write_json(model / weights.INDEX, {"metadata": {}, "weight_map": wrong})
        refused(model, words)
    held = load_file(model / second)
    save_file({**held, DOWN: torch.zeros(1), "model.norm.weight": torch.ones(1)}, model / second)
    write_json(model / weights.INDEX, {"weight_map": found})
    refused(model, second, "as another file of the folder does")
    save_file({**held, DOWN.removeprefix("model."): torch.zeros(1)}, model / second)
    refused(model, DOWN.removeprefix("model."), "the same with model. before the name")
    save_file(held, model / second)
    write_json(model / weights.INDEX, {"metadata": {}, "weight_map": {name: second for name in list(found)[:1]}})
    refused(model)
    write_json(model / weights.INDEX, {"weight_map": dict(list(found.items())[:-1])})
    assert load.load_model(small(model, "unread")), "the headers count, and both files are named"


def test_two_models_in_a_folder_and_a_pointer_instead_of_one_are_refused(model, made):
    shard(model)
    shutil.copy(made / weights.WHOLE, model / weights.WHOLE)
    refused(model, "two models", weights.INDEX)
    (model / weights.INDEX).unlink()
    (model / weights.WHOLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refused(model, "git lfs pull")
    (model / "tokenizer.json").write_text('{"model": []}')
    shutil.copy(made / weights.WHOLE, model / weights.WHOLE)
    with pytest.raises(UserError, match=r"tokenizer\.json: not a tokenizer"):
        preflight.check_model(small(model, "unread"))


def test_what_is_no_whole_model_is_refused_by_what_it_is(model, tmp_path):
    (model / weights.WHOLE).rename(model / "consolidated.safetensors")
    refused(model, "no weights", "consolidated.safetensors")
    (model / "consolidated.safetensors").unlink()
    (model / "pytorch_model.bin").touch()
    refused(model, "pickled")
    (model / "global_step3").mkdir()
    refused(model, "checkpoint of a training engine", "export")
    write_json(model / "adapter_config.json", {"base_model_name_or_path": "owner/base"})
    refused(model, "an adapter", "--merge", "owner/base")


def test_pickles_beside_safetensors_are_left_alone_and_named(model, capsys):
    (model / "pytorch_model.bin").write_bytes(b"not read")
    preflight.check_model(small(model, "unread"))
    assert load.load_model(small(model, "unread"))
    assert f"{model}: its .safetensors are loaded, not pytorch_model.bin\n" in capsys.readouterr().out


FLASH = "flash_attention_2"
"""Not installed where the tests run."""


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("value", [FLASH, "kernels-community/flash-attn2", "unknown", {"": FLASH}, 7, None], ids=str)
def test_the_attention_that_a_base_names_is_not_used(key, value, model, tmp_path):
    write_json(model / "config.json", read_json(model / "config.json") | {key: value})
    recipe = small(model, "unread")
    trained = load.load_model(recipe)
    assert trained.config._attn_implementation == "sdpa" and stages.without_weights(recipe)
    assert export.load_whole(model, "auto").config._attn_implementation == "sdpa"
    assert not base_model.config_of(model).keys() & {key} and not model_recipe.config_of(str(model)).keys() & {key}
    trained.save_pretrained(tmp_path / "saved")
    shrink.shrink(str(model), tmp_path / "shrunken", None, 8)
    for written in ("saved", "shrunken"):
        assert key not in read_json(tmp_path / written / "config.json")


@pytest.mark.parametrize("parts", [("",), ("text_config", "vision_config"), ("", "text_config")], ids=str)
def test_nor_is_that_of_a_vision_language_model_or_its_parts(parts, tmp_path):
    model = shutil.copytree(TINY_VISION, tmp_path / "model")
    config = read_json(model / "config.json")
    for part in parts:
        (config[part] if part else config)["_attn_implementation"] = FLASH
    write_json(model / "config.json", config)
    recipe = pages.find("tiny_vision", "full")
    for vision in (True, False):
        loaded = load.load_model(replace(recipe, model=replace(recipe.model, path=str(model), vision=vision))).config
        assert {loaded._attn_implementation, loaded.get_text_config()._attn_implementation} == {"sdpa"}
    assert model_recipe.tower_parameters(str(model)) == model_recipe.tower_parameters(TINY_VISION) > 0


def test_more_tokens_than_rows_are_refused_with_both_numbers(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = read_json(model / "config.json")["vocab_size"]
    preflight.check_model(small(model, "unread"))
    assert chat_templates.load_tokenizer(small(model, "unread"))
    tokenizer.add_tokens(["<one_more>"])
    tokenizer.save_pretrained(model)
    for attempt in (preflight.check_model, chat_templates.load_tokenizer):
        with pytest.raises(UserError, match=rf"{rows + 1:,} tokens .* {rows:,} rows"):
            attempt(small(model, "unread"))


def test_a_special_token_without_a_row_matters_only_where_something_writes_it(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<one_more>"]}, replace_extra_special_tokens=False)
    tokenizer.save_pretrained(model)  # as Gemma 3's smallest model has it, for images
    turns = [{"role": "user", "content": "A <one_more>?"}, {"role": "assistant", "content": "B"}]
    for method, example in (
        ("sft", {"messages": turns, "tools": None, "given": 0}),
        ("pretrain", {"text": "A <one_more>"}),
    ):
        recipe = small(model, "unread", method=method)
        preflight.check_model(recipe)
        loaded = chat_templates.load_tokenizer(recipe)
        if method == "sft":  # text that looks like a control token stays text
            assert len(tokenize.tokenized(Dataset.from_list([example]), recipe, loaded)[0]) == 1
        else:
            with pytest.raises(UserError, match=r"'<one_more>' is token .* rows"):
                tokenize.tokenized(Dataset.from_list([example]), recipe, loaded)
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text("<one_more>" + template)
    with pytest.raises(UserError, match="rows"):
        chat_templates.load_tokenizer(small(model, "unread"))


def test_a_header_is_read_as_safetensors_reads_it(model):
    found = weights.header(model / weights.WHOLE)
    tensors = load_file(model / weights.WHOLE)
    assert {name: one.shape for name, one in found.items()} == {name: tuple(one.shape) for name, one in tensors.items()}
    assert {one.dtype for one in found.values()} == {"F32"}
    content = (model / weights.WHOLE).read_bytes()
    for damaged in (content[:-1], content + b"0", content[:6], b"", json.dumps({}).encode()):
        (model / weights.WHOLE).write_bytes(damaged)
        with pytest.raises(UserError, match="damaged or cut off"):
            weights.header(model / weights.WHOLE)


def test_a_page_that_matches_the_model_has_no_differences(tmp_path):
    model = pages.page("llama3").SIZES["8b"]
    AutoConfig.for_model(**model.config).save_pretrained(tmp_path)
    assert page.compare(replace(model, path=str(tmp_path))) == []


def test_every_other_dimension_is_named(tmp_path):
    model = pages.page("llama3").SIZES["8b"]
    AutoConfig.for_model(**model.config | {"hidden_size": 2048, "num_hidden_layers": 16}).save_pretrained(tmp_path)
    assert page.compare(replace(model, path=str(tmp_path))) == [
        "hidden_size: the page has 4096, the Hub 2048",
        "num_hidden_layers: the page has 32, the Hub 16",
    ]


def test_without_a_network_it_says_so(refusal):
    assert "cannot be read" in refusal("page", "compare", "llama3-8b")
    assert "unknown recipe 'llama4'" in refusal("page", "compare", "llama4-8b")
