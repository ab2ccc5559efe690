"""LoRA, QLoRA, DoRA and adapters on experts: what they change, how they merge, and which weights get 4 bits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from bitsandbytes.nn import Linear4bit
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.bitsandbytes import replace_with_bnb_linear

from deepspeed_recipes.commands import export as export_script
from deepspeed_recipes.launching.paths import locate
from deepspeed_recipes.recipe import conversions, overrides, pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.run_folder import RunFolder, read_json, write_recipe
from deepspeed_recipes.training import export
from deepspeed_recipes.training.model import load
from deepspeed_recipes.training.model import lora as adapters
from tests.small import language_families
from tests.test_catalogue import short_run
from tests.tiers import tiered
from tests.workers import adapters as worker

ROUNDING = 2**-8
"""What bf16 rounds off, as a share of a number: 8 bits of fraction."""

VARIANTS = [("llama3-8b", "lora"), ("llama3-8b", "qlora"), ("qwen3-8b", "dora"), ("mixtral-8x7b", "lora")]
QUANTISED = [
    (family, size)
    for family in language_families()
    if "qlora" in pages.variants(pages.page(family))
    for size in pages.page(family).SIZES
]
MIXTURES = [("mixtral", "8x7b"), ("qwen3_moe", "30b-a3b"), ("gpt_oss", "20b"), ("deepseek", "v2-lite")]


def trained(ranks, tmp_path, recipe, variant, precision="bf16"):
    run = RunFolder(tmp_path / "run")
    asked = overrides.apply(short_run(pages.find(recipe, variant), tmp_path), [f"precision={precision}"])
    write_recipe(run, locate(asked))
    ranks.check(worker.main, str(run.path), log=tmp_path / "log")
    return run


@pytest.mark.parametrize(("recipe", "variant"), tiered(VARIANTS, {("llama3-8b", "qlora")}))
def test_only_adapters_change_and_they_merge_into_the_base(ranks, tmp_path, recipe, variant):
    run = trained(ranks, tmp_path, recipe, variant)
    found = read_json(worker.path_of(run))
    assert found["changed"] == [] and found["frozen"] > 10 and found["moved"]
    assert found["dtypes"] == ["torch.bfloat16"]

    merged = tmp_path / "merged"
    assert export_script.main([str(run.path), "--output", str(merged), "--merge"]) == 0
    whole = dict(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.bfloat16).named_parameters())
    before, after = (dict(model.named_parameters()) for model in exactly(run.export))
    assert whole.keys() == after.keys()
    worst = max(rounding(whole[name], before[name], after[name]) for name in after)
    # DoRA rounds a norm and a quotient on the way too.
    assert worst <= (4 if variant == "dora" else 1)
    assert (
        rounding(
            before["model.layers.0.self_attn.q_proj.weight"],
            *(weights["model.layers.0.self_attn.q_proj.weight"] for weights in (before, after)),
        )
        > 10
    ), "the base without the adapter is far off"


def exactly(adapter: Path) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return the base model of an adapter and what both give together, computed in fp32."""

    def base():
        model = export.load_base(export.base_of(adapter), adapter)
        return (model.dequantize() if getattr(model, "hf_quantizer", None) else model).float()

    return base(), PeftModel.from_pretrained(base(), adapter).merge_and_unload()


def rounding(merged: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> float:
    """Return the largest difference of a merged weight from the exact one, in roundings of the sum and of the delta."""
    allowed = ROUNDING * (after.abs() + (after - before).abs()) + 1e-6
    return ((merged.float() - after).abs() / allowed).max().item()


@pytest.mark.every
def test_pefts_merge_into_4_bits_loses_more_than_rounding(ranks, tmp_path):
    """Why `export.load_merged` dequantises first."""
    run = trained(ranks, tmp_path, "llama3-8b", "qlora")
    ours = dict(export.load_merged(run.export).named_parameters())
    again = export.load(run.export).merge_and_unload().dequantize()
    name = "model.layers.0.self_attn.q_proj.weight"
    theirs = dict(again.named_parameters())[name].float()
    assert ((ours[name].float() - theirs).abs() / ours[name].float().abs().mean()).max() > 10 * ROUNDING


def test_adapters_have_the_recipes_dtype(ranks, tmp_path):
    run = trained(ranks, tmp_path, "llama3-8b", "lora", precision="fp32")
    assert read_json(worker.path_of(run))["dtypes"] == ["torch.float32"]


def share_in_4_bits(family: str, size: str) -> tuple[float, float]:
    """Return the share of the weights that bitsandbytes quantises: of those outside embeddings and head, and of all."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**pages.page(family).SIZES[size].config))
    total = sum(p.numel() for p in model.parameters())
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    at_the_ends = sum({id(p): p.numel() for end in ends for p in end.parameters()}.values())
    nf4 = adapters.nf4(torch.bfloat16)
    model = replace_with_bnb_linear(model, modules_to_not_convert=["lm_head", "embed_out"], quantization_config=nf4)
    layers = [module for module in model.modules() if isinstance(module, Linear4bit)]
    quantised = sum(layer.in_features * layer.out_features for layer in layers)
    return quantised / (total - at_the_ends), quantised / total


@pytest.mark.parametrize(
    ("family", "size"), tiered(QUANTISED, lambda case: case[0] in ("gemma3", "gpt_neox", "llama3", "qwen3"))
)
def test_qlora_is_offered_where_90_percent_of_the_layers_weights_become_4_bit(family, size):
    inner, whole = share_in_4_bits(family, size)
    print(f"{family}-{size}: {inner:.1%} of the layers, {whole:.1%} with embeddings and head")
    assert inner >= 0.9


@pytest.mark.parametrize(("family", "size"), MIXTURES)
def test_mixtures_have_no_qlora_because_their_experts_would_not_be_quantised(family, size):
    assert share_in_4_bits(family, size)[0] < 0.9
    assert "qlora" not in pages.variants(pages.page(family))
    assert pages.page(family).lora(size).lora.target_parameters or family == "deepseek"


def test_4_bit_weights_without_adapters_are_refused():
    with pytest.raises(UserError, match=r"nf4 without lora: 4-bit weights cannot be trained; add adapters"):
        overrides.apply(pages.find("llama3-8b", "full"), ["model.quantization=nf4"])


def test_missing_targets_are_named(model_folder):
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    lora = pages.find("mixtral-8x7b", "lora").lora
    with pytest.raises(UserError, match=r"lora.target_modules=query_key_value"):
        adapters.add(model, overrides.apply(pages.find("tiny", "lora"), ["lora.target_modules=query_key_value"]).lora)
    assert lora.target_parameters


HYBRID = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "layer_types": ["mamba", "attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "num_local_experts": 0,
    "shared_intermediate_size": 64,
}


def test_the_kinds_whose_kernels_read_a_weight_by_themselves_are_known():
    models = Path(transformers.__file__).parent / "models"
    found = {
        file.parent.name
        for file in models.glob("*/modeling_*.py")
        if "self.out_proj.weight" in (text := file.read_text(encoding="utf-8")) and "mamba" in text
    }
    assert found == set(conversions.MAMBA)


def test_a_router_that_returns_more_than_a_product_has_no_adapter():
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("phimoe", **sizes, **heads))
    lora = pages.find("tiny", "lora").lora
    with pytest.raises(UserError, match=r"target_modules=q_proj,router: router of phimoe returns more than a product"):
        adapters.add(model, replace(lora, target_modules="q_proj,router"))
    adapted = adapters.add(model, replace(lora, target_modules="all-linear", fused=False))
    assert adapted(input_ids=torch.arange(8)[None]).logits.isfinite().all()
    names = {name for name, _ in adapted.named_modules()}
    assert any("q_proj.lora_A" in name for name in names) and not any("router.lora_A" in name for name in names)


def test_a_weight_that_kernels_read_by_themselves_has_no_adapter_and_no_4_bits(tmp_path):
    config = AutoConfig.for_model("granitemoehybrid", **HYBRID)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    recipe = overrides.apply(pages.find("tiny", "lora"), ["model.quantization=nf4", "precision=bf16"])
    stored = load.quantization(recipe, config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=stored)
    mixer = model.model.layers[0].mamba
    assert isinstance(mixer.in_proj, Linear4bit) and not isinstance(mixer.out_proj, Linear4bit)
    assert not isinstance(model.lm_head, Linear4bit)
    adapters.add(model, recipe.lora)
    assert hasattr(mixer.in_proj, "lora_A") and not hasattr(mixer.out_proj, "lora_A")
    named = overrides.apply(recipe, ["lora.target_modules=in_proj,out_proj"]).lora
    with pytest.raises(UserError, match=r"target_modules=in_proj,out_proj: granitemoehybrid's kernels read out_proj"):
        conversions.lora_options(named, kind="granitemoehybrid")
