"""The export of a base with more than was trained, such as a vision tower, is the whole checkpoint."""

import json
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForConditionalGeneration,
)

from deepspeed_recipes.commands.main import run as run_command
from deepspeed_recipes.export import push
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.recipe import Lora
from deepspeed_recipes.recipe.run_folder import RunFolder, read_json, write_json, write_recipe
from deepspeed_recipes.recipe.samples import TINY_MODEL
from deepspeed_recipes.training import export
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training.model import load, stored, untrained
from deepspeed_recipes.training.model_folder import base_model, weights
from tests.ranks import read_logs
from tests.small import small
from tests.tiers import tiered

IDS = torch.arange(5, 25)[None]
LINEAR = {f"linear_{part}_head_dim": 16 for part in ("key", "value")} | {
    f"linear_num_{part}_heads": 2 for part in ("key", "value")
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
VISION |= {"patch_size": 4, "num_position_embeddings": 16}
TEXT = {"hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
TEXT |= {"layer_types": ["linear_attention", "full_attention"], "initializer_range": 0.2} | LINEAR
TEXT |= {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_MODEL)


def qwen3_5(folder, tokenizer):
    """Write a small Qwen3.5 with its vision tower and a layer that predicts a second token, in two files."""
    text = TEXT | {"vocab_size": len(tokenizer), "intermediate_size": 96}
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=VISION, tie_word_embeddings=False)
    torch.manual_seed(0)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_json(folder / "preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4})
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", config | {"mtp_num_hidden_layers": 1})
    tensors = load_file(folder / weights.WHOLE)
    tensors |= {"mtp.fc.weight": torch.randn(64, 128).bfloat16(), "mtp.norm.weight": torch.randn(64)}
    split(folder, tensors)
    return folder


def moe(folder, tokenizer, fused):
    """Write a small Qwen3.5 MoE whose files have a tensor for each expert, or one for all."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    text = TEXT | experts | {"vocab_size": len(tokenizer), "shared_expert_intermediate_size": 16}
    model = Qwen3_5MoeForConditionalGeneration(
        AutoConfig.for_model("qwen3_5_moe", text_config=text, vision_config=VISION)
    )
    model.save_pretrained(folder)
    if fused:
        save_file(model.state_dict(), folder / weights.WHOLE, metadata={"format": "pt"})


def mistral3(folder, tokenizer, old):
    """Write a small Mistral 3, whose whole no class for text loads, by the older or newer names of its tensors."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"head_dim": 16}
    text = AutoConfig.for_model("mistral", **sizes, num_key_value_heads=1, vocab_size=len(tokenizer))
    seeing = AutoConfig.for_model("pixtral", **sizes, image_size=28, patch_size=14)
    config = Mistral3Config(text_config=text, vision_config=seeing, tie_word_embeddings=False)
    model = Mistral3ForConditionalGeneration(config)
    model.save_pretrained(folder)
    if not old:
        save_file(model.state_dict(), folder / weights.WHOLE, metadata={"format": "pt"})


def deepseek(folder, tokenizer):
    """Write a small DeepSeek V3 with one more layer than its configuration has, which predicts a second token."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": 16}
    sizes |= {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "first_k_dense_replace": 1}
    config = AutoConfig.for_model("deepseek_v3", **sizes, **heads, vocab_size=len(tokenizer))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tensors = load_file(folder / weights.WHOLE)
    more = {name.replace("s.1.", "s.2."): tensor.clone() for name, tensor in tensors.items() if "layers.1." in name}
    more["model.layers.2.eh_proj.weight"] = torch.ones(32, 64)
    save_file(tensors | more, folder / weights.WHOLE, metadata={"format": "pt"})


FAMILIES = {
    "experts": (lambda *of: moe(*of, False), "model.visual"),
    "fused_experts": (lambda *of: moe(*of, True), "model.visual"),
    "mistral3": (lambda *of: mistral3(*of, False), "model.vision_tower"),
    "mistral3_older": (lambda *of: mistral3(*of, True), "vision_tower"),
    "deepseek": (deepseek, "model.layers.2"),
}


@pytest.mark.parametrize("name", tiered(FAMILIES, {"fused_experts", "mistral3_older", "deepseek"}))
def test_names_and_configuration_are_the_bases_in_every_form(tmp_path, tokenizer, name):
    make, part = FAMILIES[name]
    base, folder = tmp_path / "base", tmp_path / "export"
    make(base, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(base, **load.text_part(AutoConfig.from_pretrained(base)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    model.config.bos_token_id = 0  # as the Trainer copies it from the tokenizer
    model.config.use_cache = False
    model.save_pretrained(folder)
    stored.check(str(base), model)
    copied = sum(all_tensors(base)[name].nbytes for name in all_tensors(base) if name.startswith(f"{part}."))
    assert untrained.size(str(base)) >= copied > 0
    left = untrained.add(folder, str(base), "vocabulary", False)
    before, after = all_tensors(base), all_tensors(folder)
    assert before.keys() == after.keys() and any(name.startswith(part) for name in left)
    assert all(torch.equal(before[name], after[name]) for name in left)
    assert not any(torch.equal(before[name], after[name]) for name in before.keys() - set(left) if before[name].any())
    assert read_json(base / "config.json") == read_json(folder / "config.json")
    assert torch.equal(logits(export.load(folder)), logits(model))


def split(folder, tensors):
    (folder / weights.WHOLE).unlink()
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: tensors[name].contiguous() for name in held}, folder / file, metadata={"format": "pt"})
    found = {name: file for file, held in files.items() for name in held}
    write_json(folder / weights.INDEX, {"metadata": {}, "weight_map": found})


def all_tensors(folder):
    found = {}
    for file in weights.files(folder):
        found |= load_file(file)
    return found


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS).logits


def is_whole(base, folder):
    """Expect the base's tensors, those of tower and second token unchanged; return how many of the others changed."""
    before, after = all_tensors(base), all_tensors(folder)
    assert before.keys() == after.keys()
    untouched = {name for name in before if name.startswith(("mtp.", "model.visual."))}
    assert {before[name].dtype for name in untouched} == {torch.float32, torch.bfloat16}
    assert all(before[name].dtype == after[name].dtype and torch.equal(before[name], after[name]) for name in untouched)
    held = read_json(folder / "provenance.json")
    assert held["untouched"].keys() == untouched and held["trained_as"] == "Qwen3_5ForCausalLM"
    assert read_json(folder / "config.json") == read_json(base / "config.json")
    assert (folder / "preprocessor_config.json").read_bytes() == (base / "preprocessor_config.json").read_bytes()
    return sum(not torch.equal(before[name], after[name]) for name in before.keys() - untouched)


def agree(folder, expected):
    """Expect these logits of the folder in its own class, of its text part, and as this project loads it."""
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    assert type(whole).__name__ == read_json(folder / "config.json")["architectures"][0]
    for model in (whole, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), export.load(folder)):
        assert (logits(model) - expected).abs().max() / expected.abs().max() < 1e-4


def test_a_model_that_is_loaded_whole_for_text_keeps_its_processor(tmp_path, tokenizer):
    """Gemma 3, whose class has the tower: servers need the processor, and this project asks it for text."""
    base, folder = tmp_path / "base", tmp_path / "export"
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = sizes | {"vocab_size": len(tokenizer), "num_key_value_heads": 1, "head_dim": 16}
    vision = sizes | {"image_size": 28, "patch_size": 14}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = AutoModelForCausalLM.from_config(config)
    for place in (base, folder):
        model.save_pretrained(place)
        tokenizer.save_pretrained(place)
    write_json(base / "preprocessor_config.json", {"image_processor_type": "Gemma3ImageProcessor"})
    assert untrained.add(folder, str(base), "vocabulary", False) == []
    assert (folder / "preprocessor_config.json").exists() and base_model.head_of(folder) == "vocabulary"
    assert torch.equal(logits(export.load(folder)), logits(model))
    untrained.check(folder)
    untrained.add(base, str(folder), "vision", False)
    assert base_model.head_of(base) == "vision", "a model that was trained to see is left as it is"


@pytest.fixture(scope="module")
def base(tmp_path_factory, tokenizer):
    return qwen3_5(tmp_path_factory.mktemp("base"), tokenizer)


@pytest.fixture(scope="module")
def runs(ranks, base, conversations, tmp_path_factory):
    """Train the text part under ZeRO-3 on two ranks: all weights, and adapters."""
    found = {}
    for name, lora in (("full", None), ("lora", Lora(rank=4))):
        run = RunFolder(tmp_path_factory.mktemp(name) / "run")
        settings = {"max_steps": 2, "micro_batch_size": 2, "lora": lora, "save_steps": 2}
        write_recipe(run, small(base, conversations, "zero3.json", **settings))
        ranks.check(training_run.main, str(run.path), log=run.path.parent / "log")
        found[name] = run
    return found


def test_all_weights_are_exported_with_what_was_not_trained(base, runs, tmp_path):
    run = runs["full"]
    assert is_whole(base, run.export) > 20
    said = read_logs(run.path.parent / "log")[0]
    assert "neither loaded nor trained: model.visual, mtp; the export has them unchanged" in said
    agree(run.export, logits(export.load(run.export)))
    assert f"\nmtp: {base_model.DRAFTS}\n" in said
    card = (run.export / "README.md").read_text()
    assert "| `model.visual`, `mtp` |" in card and f"| `mtp` | {base_model.DRAFTS} |" in card
    assert any(file.name == "provenance.json" for file in push.files(run.export)), "it can be published"
    checkpoint = tmp_path / "checkpoint"
    assert run_command("export", [str(run.checkpoints / "checkpoint-2"), "--output", str(checkpoint)]) == 0
    is_whole(base, checkpoint)
    ours, theirs = all_tensors(run.export), all_tensors(checkpoint)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_an_adapter_is_merged_into_the_whole_checkpoint(base, runs, tmp_path):
    expected = logits(export.load(runs["lora"].export))
    merged = tmp_path / "merged"
    assert run_command("export", [str(runs["lora"].path), "--merge", "--output", str(merged)]) == 0
    assert is_whole(base, merged) > 5
    agree(merged, expected)


def test_an_adapter_applies_to_the_whole_model(base, runs):
    """Servers load the whole; by the names of the text part PEFT would leave all of it out."""
    adapter = runs["lora"].export
    whole = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    without = logits(whole)
    expected = logits(export.load(adapter))
    found = logits(PeftModel.from_pretrained(whole, adapter))
    assert (found - expected).abs().max() / expected.abs().max() < 1e-4
    assert (found - without).abs().max() / expected.abs().max() > 1e-2
    names = load_file(adapter / "adapter_model.safetensors")
    assert {name.count(".model.language_model.layers.") for name in names} == {1}
    adapted = {name for name, _ in whole.named_modules() if "lora_A" in name}
    assert adapted and not any("visual" in name for name in adapted)
    assert "AutoModelForImageTextToText" in (adapter / "README.md").read_text()


def test_an_untouched_tensor_that_differs_is_noticed(runs, tmp_path, capsys):
    damaged = shutil.copytree(runs["full"].export, tmp_path / "damaged")
    index = read_json(damaged / weights.INDEX)["weight_map"]
    file = damaged / index["mtp.norm.weight"]
    save_file(load_file(file) | {"mtp.norm.weight": torch.zeros(64)}, file, metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match=r"mtp\.norm\.weight should be the base model's, unchanged, but differs"):
        untrained.check(damaged)
    with pytest.raises(UserError, match=r"mtp\.norm\.weight is not as it was written"):
        export.write(damaged, tmp_path / "copy", merge=False)
    assert not (tmp_path / "copy").exists()


@pytest.mark.every
def test_a_quantised_copy_is_of_the_text_part(runs, tmp_path, conversations, capsys):
    source, small = runs["full"].export, tmp_path / "nf4"
    command = [str(source), "--quantize", "nf4", "--output", str(small), "--allow-drop", "100"]
    assert run_command("export", [*command, "--data", str(conversations), "--limit", "2"]) == 0
    assert "of the text part alone, without model.visual, mtp" in capsys.readouterr().out
    assert not (small / "provenance.json").exists() and not any("visual" in name for name in all_tensors(small))


def test_a_copy_of_a_whole_export_is_whole(base, runs, tmp_path):
    export.write(runs["full"].export, tmp_path / "copy", merge=False)
    assert is_whole(base, tmp_path / "copy") > 20
    assert json.loads((tmp_path / "copy" / "expected.json").read_text())["tensors"].keys() == all_tensors(base).keys()


def test_weights_of_other_sizes_are_named():
    """Under ZeRO-3 torch says which on a second line."""
    recipe = pages.find("tiny", "full")
    with pytest.raises(RuntimeError) as error:
        torch.nn.Linear(2, 3).load_state_dict(torch.nn.Linear(2, 4).state_dict())
    assert load.cannot_load("model", recipe, error.value).endswith("are not those of its weights (weight)")
