"""Quantised exports: smaller, measured beside the original, refused where they lost too much."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from deepspeed_recipes.commands.main import run as run_command
from deepspeed_recipes.export.quantize import KINDS, measure, write
from deepspeed_recipes.export.quantize.measure import Comparison
from deepspeed_recipes.export.serve import environment
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.run_folder import CHECK_FAILED, read_json, write_json
from deepspeed_recipes.recipe.samples import CHAT, TINY_MODEL, TINY_VISION
from deepspeed_recipes.training import export
from deepspeed_recipes.training.model_folder import dequantized, record
from tests.tiers import tiered

HELD_OUT = CHAT.validation


def quantize(source, kind, output, *more):
    words = [str(source), "--quantize", kind, "--output", str(output)]
    return run_command("export", [*words, *more])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the model that ships with the project, as an exported folder."""
    folder = tmp_path_factory.mktemp("export") / "model"
    export.write(Path(TINY_MODEL), folder, merge=False)
    return folder


@pytest.mark.parametrize(
    ("kind", "share"), tiered([("nf4", 0.4), ("int8-bitsandbytes", 0.6)], lambda case: case[0] == "nf4")
)
def test_a_quantised_model_is_smaller_and_still_the_same_one(kind, share, model, tmp_path, capsys):
    """Beside 4 or 8 of 16 bits per weight, the embedding stays in bf16: a tenth of this model."""
    output = tmp_path / "small"
    assert quantize(model, kind, output, "--data", HELD_OUT, "--limit", "4") == 0
    said = capsys.readouterr().out
    assert "exact match on 4 held-out examples" in said and "the same token at" in said
    assert write.size(output) < share * write.size(model)
    whole, reloaded = export.load(model).eval(), export.load(output).eval()
    tokens = torch.arange(16)[None]
    trained, quantised = whole(input_ids=tokens).logits, reloaded(input_ids=tokens).logits.float()
    difference = ((trained - quantised).norm() / trained.norm()).item()
    assert 0 < difference < 0.2
    assert read_json(output / "tokenizer_config.json")["response_template"]
    assert not list(tmp_path.glob("small.*"))


def test_one_that_lost_too_much_is_refused_and_nothing_stays(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measure, "lost", lambda found, allowed: "exact match falls from 90.0% to 80.0%.")
    kept = tmp_path / "kept"
    kept.mkdir()
    assert quantize(model, "nf4", kept, "--data", HELD_OUT, "--limit", "1") == 2
    said = capsys.readouterr().err
    assert "int8-bitsandbytes loses less" in said and said.count("\n") == 1
    assert list(tmp_path.iterdir()) == [kept] and not list(kept.iterdir())


@pytest.mark.parametrize(
    ("metric", "before", "after", "allowed", "refused"),
    [
        ("exact_match", 0.98, 0.965, 2.0, False),
        ("exact_match", 0.98, 0.955, 2.0, True),
        ("exact_match", 0.98, 0.955, 5.0, False),
        ("exact_match", 0.50, 0.90, 2.0, False),
        ("loss", 1.00, 1.015, 2.0, False),
        ("loss", 1.00, 1.03, 2.0, True),
    ],
)
def test_how_much_may_be_lost(metric, before, after, allowed, refused):
    assert (measure.lost(Comparison(metric, 100, before, after, 0.9, "token"), allowed) is not None) == refused


def test_what_cannot_be_quantised_is_refused_before_anything_is_loaded(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(environment.VARIABLE, str(tmp_path / "nowhere"))
    full, failed, scores, small, experts, embeds = (
        tmp_path / name for name in ("full", "failed", "scores", "small", "experts", "embeds")
    )
    for folder in (full, failed, scores, small, experts, embeds):
        folder.mkdir()
        write_json(folder / "config.json", read_json(model / "config.json"))
    write_json(failed / CHECK_FAILED, {})
    write_json(scores / "config.json", {"architectures": ["Qwen3ForSequenceClassification"]})
    write_json(small / "config.json", {"quantization_config": {}})
    write_json(experts / "config.json", {"num_experts": 4})
    write_json(embeds / "config.json", {"architectures": ["Qwen3Model"]})
    new = tmp_path / "new"
    for source, kind, output, words in (
        (embeds, "nf4", new, "returns embeddings"),
        (TINY_VISION, "nf4", new, "is not for models that read images"),
        (experts, "nf4", new, "is an MoE model, and bitsandbytes leaves experts"),
        (experts, "int8-bitsandbytes", new, "is an MoE model, and bitsandbytes leaves experts"),
        (model, "int3", new, "choose int8, int4, fp8, nf4"),
        (model, "nf4", full, "is not empty"),
        (failed, "nf4", new, "failed its check"),
        (scores, "nf4", new, "returns scores"),
        (small, "nf4", new, "already quantised"),
        (model, "int8", new, "make serving"),
    ):
        assert quantize(source, kind, output) == 2, words
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1 + (kind == "int8"), said
        assert ("int8-bitsandbytes (8-bit weights; for" in said) == (kind == "int8")
        assert not new.exists()


def test_without_examples_what_is_calibrated_says_so(model):
    with pytest.raises(UserError, match="add --data FILE"):
        measure.calibration(None, model)


def test_the_kinds_that_are_calibrated_are_llm_compressors():
    assert all(kind.quantizer == "llm-compressor" for kind in KINDS.values() if kind.calibrated)


def wide(folder, width=256):
    """Write a model whose matrices are several blocks wide, and return the folder."""
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 384, "num_attention_heads": 4}
    config = AutoConfig.from_pretrained(TINY_MODEL, **sizes, num_key_value_heads=2, head_dim=64)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "proj" in name:
                weight[:, 128:] *= 4  # so that the blocks' factors differ
    model.save_pretrained(folder, max_shard_size="2MB")
    AutoTokenizer.from_pretrained(TINY_MODEL).save_pretrained(folder)
    return folder


def test_fp8_in_blocks_is_read_as_published_models_are(tmp_path, capsys):
    source, output = wide(tmp_path / "source"), tmp_path / "small"
    for name in ("LICENSE", "more.tiktoken", "parts/a.txt", "pytorch_model.bin"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(name)
    assert quantize(source, "fp8-block", output) == 0
    kept = {name for name in ("LICENSE", "more.tiktoken", "parts/a.txt") if (output / name).read_text() == name}
    assert len(kept) == 3 and not (output / "pytorch_model.bin").exists()
    config = read_json(output / "config.json")["quantization_config"]
    assert config["quant_method"] == "fp8" and config["weight_block_size"] == [128, 128]
    before, held = load_whole(source), load_whole(output)
    small = {name for name, tensor in held.items() if tensor.dtype == torch.float8_e4m3fn}
    assert small == {name for name in before if "proj" in name}
    kept = {name: tensor for name, tensor in before.items() if name not in small}
    assert all(torch.equal(held[name], tensor) for name, tensor in kept.items())
    assert {name.removesuffix(".weight") for name, tensor in kept.items() if tensor.dim() > 1} == set(
        config["modules_to_not_convert"]
    )
    read = dequantized.state(output, config, torch.float32)
    swapped = {name: held[f"{name}_scale_inv"].flip(1) for name in small}
    for name in small:
        whole = before[name]
        found = read[name] + torch.zeros_like(whole)
        # e4m3 has three bits behind the point: an error of 1/16, and below 2^-6 of a block's largest a fixed step.
        assert ((found - whole).abs() <= whole.abs() / 16 + whole.abs().max() * 2**-17).all(), name
        factors = swapped[name].repeat_interleave(128, 0).repeat_interleave(128, 1)[: whole.shape[0], : whole.shape[1]]
        wrong = held[name].float() * factors
        assert not ((wrong - whole).abs() <= whole.abs() / 16 + whole.abs().max() * 2**-17).all(), name


def test_fp8_is_written_as_the_base_model_was_published(tmp_path, capsys):
    source, output = wide(tmp_path / "source"), tmp_path / "small"
    record.write(source, record.Record(pages.find("tiny-3m", "full"), {"dequantized": "fp8"}), None)
    assert quantize(source, "fp8", output, "--limit", "2") == 0
    assert "as the base model was published" in capsys.readouterr().out
    assert read_json(output / "config.json")["quantization_config"]["quant_method"] == "fp8"
    assert read_json(output / "training" / "results.json")["dequantized"] == "fp8"


def test_fp8_in_blocks_refuses_what_is_no_whole_block(tmp_path, capsys):
    assert quantize(wide(tmp_path / "source", width=192), "fp8-block", tmp_path / "small") == 2
    said = capsys.readouterr().err
    assert "is not a multiple of 128 on each side" in said and said.count("\n") == 1
    assert not (tmp_path / "small").exists()


def load_whole(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
