"""Bases published in FP8, MXFP4 or compressed-tensors are dequantised on loading, and compute what their copy does."""

import shutil

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from deepspeed_recipes.launching import preflight
from deepspeed_recipes.prove import techniques
from deepspeed_recipes.prove.techniques import small
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.recipe import Lora, Model
from deepspeed_recipes.recipe.run_folder import RunFolder, read_json, write_json, write_recipe
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training.model import load
from deepspeed_recipes.training.model_folder import dequantized, weights
from tests.tiers import tiered

IDS = torch.arange(5, 25)[None]
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK = (48, 32)
"""Does not divide the weights' 64 and 128 rows: the last block is a smaller one."""


def is_layer(name, tensor):
    return name.endswith("proj.weight") and tensor.dim() == 2


def fp8(name, tensor, rows, columns):
    """Return a weight in blocks of FP8, and what it is worth."""
    scale = torch.ones(-(-tensor.shape[0] // rows), -(-tensor.shape[1] // columns))
    stored, worth = torch.empty_like(tensor).to(torch.float8_e4m3fn), torch.empty_like(tensor)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            place = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scale[i, j] = tensor[place].abs().max() / 448
            stored[place] = (tensor[place] / scale[i, j]).to(torch.float8_e4m3fn)
            worth[place] = stored[place].float() * scale[i, j]
    return {name: stored, f"{name}_scale_inv": scale}, worth


def blocks(name, tensor):
    return fp8(name, tensor, *BLOCK)


def whole_tensor(name, tensor):
    """As Ministral's: one scale for the weight, one for the activations."""
    parts, worth = fp8(name, tensor, *tensor.shape)
    extra = {name.replace("weight", "activation_scale"): torch.tensor(1.0)}
    return {**parts, f"{name}_scale_inv": parts[f"{name}_scale_inv"].reshape(())} | extra, worth


def compressed(kind, bits, strategy, group=None, symmetric=True):
    """Return what quantises a weight by compressed-tensors' own code, and its block in config.json."""
    form = "pack-quantized" if bits == 4 else "int-quantized" if kind == "int" else "float-quantized"
    arguments = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": symmetric, "group_size": group}
    groups = {"group_0": {"targets": ["Linear"], "weights": arguments}}
    block = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}
    scheme = QuantizationConfig.model_validate(block).config_groups["group_0"]

    def quantize(name, tensor):
        most = 448 if kind == "float" else 2 ** (bits - 1) - 1
        size = group or tensor.shape[1]
        pieces = tensor.unflatten(1, (-1, size))
        scale = pieces.abs().amax(-1) / most
        parts = {"weight": tensor, "weight_scale": scale}
        if not symmetric:
            low, high = pieces.amin(-1), pieces.amax(-1)
            scale = parts["weight_scale"] = (high - low) / (2**bits - 1)
            parts["weight_zero_point"] = (-(2 ** (bits - 1)) - low / scale).round().to(torch.int8)
        compressor = BaseCompressor.get_value_from_registry(form)
        stored = compressor.compress(dict(parts), scheme)
        worth = compressor.decompress(dict(stored), scheme)["weight"]
        layer = name.removesuffix("weight")
        return {layer + part: value for part, value in stored.items() if value is not None}, worth.float()

    return quantize, block


FORMATS = {
    "fp8_blocks": (blocks, {"quant_method": "fp8", "weight_block_size": list(BLOCK)}),
    "fp8_tensor": (whole_tensor, {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}),
    "float_channel": compressed("float", 8, "channel"),
    "int8_channel": compressed("int", 8, "channel"),
    "int4_group": compressed("int", 4, "group", 32),
    "int4_asymmetric": compressed("int", 4, "group", 32, symmetric=False),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return techniques.random_qwen3(tmp_path_factory.mktemp("plain"), tie_word_embeddings=False)


def publish(plain, folder, name):
    """Write a model in a format, and beside it the copy without quantisation that its values are worth."""
    quantize, block = FORMATS[name]
    published, copy = shutil.copytree(plain, folder / "published"), shutil.copytree(plain, folder / "copy")
    stored, worth = {}, {}
    for tensor_name, tensor in load_file(plain / weights.WHOLE).items():
        parts, value = quantize(tensor_name, tensor) if is_layer(tensor_name, tensor) else ({tensor_name: tensor},) * 2
        stored |= {key: part.contiguous() for key, part in parts.items()}
        worth[tensor_name] = value[tensor_name] if isinstance(value, dict) else value.contiguous()
    save_file(stored, published / weights.WHOLE, metadata={"format": "pt"})
    save_file(worth, copy / weights.WHOLE, metadata={"format": "pt"})
    config = read_json(published / "config.json")
    write_json(published / "config.json", config | {"quantization_config": block})
    return published, copy


@torch.no_grad()
def logits(folder, attention="sdpa"):
    recipe = small(folder, "unread", model=Model(str(folder), attention=attention))
    return load.load_base(recipe).eval()(input_ids=IDS).logits


@pytest.mark.parametrize("name", tiered(FORMATS, {"fp8_blocks", "int8_channel", "int4_group"}))
def test_the_logits_are_those_of_the_copy(plain, tmp_path, name, capsys):
    published, copy = publish(plain, tmp_path, name)
    preflight.check_model(small(published, "unread"))
    expected = logits(copy)
    said = capsys.readouterr().out
    found = logits(published)
    assert "dequantised on loading" in capsys.readouterr().out and "dequantised" not in said
    assert (found - expected).abs().max() / expected.abs().max() < 1e-5
    assert (logits(plain) - expected).abs().max() / expected.abs().max() > 1e-3, "or the format lost nothing"
    tensors = load_file(published / weights.WHOLE)
    scale = next(key for key in sorted(tensors) if key.endswith(("_scale", "_scale_inv")) and "activ" not in key)
    save_file(tensors | {scale: tensors[scale] * 2}, published / weights.WHOLE, metadata={"format": "pt"})
    assert (logits(published) - expected).abs().max() / expected.abs().max() > 1e-2, "another scale is noticed"


def test_a_run_from_fp8_trains_what_a_run_from_the_copy_trains(ranks, plain, conversations, tmp_path):
    """Under ZeRO-3 on two ranks, with a layer that is not loaded; the export is unquantised, that layer too."""
    published, copy = publish(plain, tmp_path, "fp8_blocks")
    for folder in (published, copy):
        tensors = load_file(folder / weights.WHOLE)
        layer = {name: tensor for name, tensor in tensors.items() if "layers.1." in name}
        more = {name.replace("layers.1.", "layers.2."): tensor.clone() for name, tensor in layer.items()}
        save_file(tensors | more, folder / weights.WHOLE, metadata={"format": "pt"})
    exports = {}
    for folder in (published, copy):
        run = RunFolder(tmp_path / folder.name / "run")
        write_recipe(run, small(folder, conversations, "zero3.json", max_steps=2, micro_batch_size=2))
        ranks.check(training_run.main, str(run.path), log=tmp_path / "log")
        exports[folder] = load_file(run.export / "model-00001-of-00002.safetensors")
        exports[folder] |= load_file(run.export / "model-00002-of-00002.safetensors")
        assert "quantization_config" not in read_json(run.export / "config.json")
        assert read_json(run.export / "provenance.json")["dequantized"] == ("fp8" if folder == published else None)
        card = (run.export / "README.md").read_text()
        assert ("published as fp8" in card) == (folder == published)
    assert exports[published].keys() == exports[copy].keys() == load_file(copy / weights.WHOLE).keys()
    for name, tensor in exports[copy].items():
        close = {"rtol": 1e-2, "atol": 1e-6} if "layers.2." in name else {"rtol": 0, "atol": 1e-5}  # that in bf16
        torch.testing.assert_close(exports[published][name].float(), tensor, **close)


def test_a_scale_that_is_missing_or_has_another_shape_is_refused(plain, tmp_path):
    published, _ = publish(plain, tmp_path, "fp8_blocks")
    tensors = load_file(published / weights.WHOLE)
    scale = next(key for key in tensors if key.endswith("down_proj.weight_scale_inv"))
    save_file(tensors | {scale: torch.ones(63, 5)}, published / weights.WHOLE, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"scales have the shape \[63, 5\], which does not fit \[64, 128\]"):
        load.load_base(small(published, "unread"))
    tensors.pop(scale)
    save_file(tensors, published / weights.WHOLE, metadata={"format": "pt"})
    for attempt in (preflight.check_model, load.load_base):
        with pytest.raises(UserError, match=r"down_proj\.weight is F8_E4M3, which are not weights without scales"):
            attempt(small(published, "unread"))


def test_gpt_oss_experts_are_read_from_mxfp4(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_local_experts": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2}
    config = AutoConfig.for_model("gpt_oss", **sizes, **heads, vocab_size=1152, initializer_range=0.2)
    plain = techniques.random_model(tmp_path / "plain", config)
    stored, worth = {}, {}
    random = torch.Generator().manual_seed(0)
    for name, tensor in load_file(plain / weights.WHOLE).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = worth[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        packed = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=random, dtype=torch.uint8)
        scales = torch.randint(120, 126, (experts, outputs, inputs // 32), generator=random, dtype=torch.uint8)
        stored |= {f"{name}_blocks": packed, f"{name}_scales": scales}
        values = torch.tensor([*FP4, *(-value for value in FP4)])
        pairs = torch.stack([values[(packed & 15).long()], values[(packed >> 4).long()]], -1).flatten(-2)
        worth[name] = (pairs * 2.0 ** (scales.float() - 127)[..., None]).flatten(-2).transpose(1, 2).contiguous()
    copy = shutil.copytree(plain, tmp_path / "copy")
    save_file(worth, copy / weights.WHOLE, metadata={"format": "pt"})
    save_file(stored, plain / weights.WHOLE, metadata={"format": "pt"})
    content = read_json(plain / "config.json") | {"quantization_config": {"quant_method": "mxfp4"}}
    write_json(plain / "config.json", content)
    assert torch.equal(logits(plain, "eager"), logits(copy, "eager"))
    held = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)  # transformers' own way
    ours = dequantized.state(plain, content["quantization_config"], torch.bfloat16)
    for name, tensor in held.state_dict().items():
        assert torch.equal(ours[name].to(torch.bfloat16) + 0, tensor), name


def test_qlora_quantises_what_the_published_weights_are_worth(plain, tmp_path):
    found = []
    for folder in publish(plain, tmp_path, "fp8_blocks"):
        quantised = Model(str(folder), quantization="nf4")
        model = load.load_model(small(folder, "unread", precision="bf16", model=quantised, lora=Lora(rank=4)))
        assert type(model.base_model.model.model.layers[0].mlp.down_proj.base_layer).__name__ == "Linear4bit"
        with torch.no_grad():
            found.append(model.eval()(input_ids=IDS).logits)
    assert torch.equal(*found)
