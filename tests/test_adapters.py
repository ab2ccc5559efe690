"""LoRA, QLoRA, DoRA and adapters on experts: what they change, how they merge, and which weights get 4 bits.

Fused LoRA computes what PEFT's layers compute, with fewer passes over memory, and trains the same adapters.
"""

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear as PeftLinear
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.bitsandbytes import replace_with_bnb_linear

from deepspeed_recipes.commands import export as export_script
from deepspeed_recipes.launching.paths import locate
from deepspeed_recipes.recipe import conversions, overrides, pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.recipe import Layout, Lora, Model
from deepspeed_recipes.recipe.run_folder import RunFolder, read_json, read_jsonl
from deepspeed_recipes.training import export
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training.model import load, lora
from deepspeed_recipes.training.model import lora as adapters
from deepspeed_recipes.training.model_folder import base_model
from tests.parity import gate, plain
from tests.ranks import run_on
from tests.small import language_families, with_zero
from tests.test_catalogue import short_run
from tests.tiers import tiered
from tests.workers import adapters as worker
from tests.workers import mistakes

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
    asked = overrides.apply(short_run(pages.find(recipe, variant), tmp_path), [f"precision={precision}"])
    return run_on(ranks, locate(asked), tmp_path, function=worker.main)


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
        model = export.load_base(base_model.find(adapter), adapter)
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
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    narrow = model.model.layers[0].self_attn.k_proj.weight.shape[0]
    with pytest.raises(UserError, match=rf"lora.rank={narrow + 1}: PiSSA .*, and k_proj has {narrow}; set lora.rank"):
        adapters.add(model, replace(LORA, init="pissa", rank=narrow + 1, target_modules="q_proj,k_proj"))


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ("embed_tokens,lm_head", "lm_head is in lora.target_modules, too; a module is trained whole or gets adapters"),
        ("embed_tokens", "lora.modules_to_save=embed_tokens: modules_to_save cannot be applied to"),  # the head is tied
    ],
)
def test_a_module_gets_adapters_or_is_trained_whole(model_folder, saved, message):
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    with pytest.raises(UserError, match=message):
        adapters.add(model, replace(LORA, target_modules="q_proj,lm_head", modules_to_save=saved))


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


IN, OUT, RANK = 96, 160, 4
ROUNDINGS = 16
"""Of the largest value, by which sums in another order may differ."""


class Layer(nn.Module):
    """A model of one linear layer, of 4-bit weights where that is asked for."""

    def __init__(self, bias: bool = False, quantised: bool = False) -> None:
        super().__init__()
        kind = partial(Linear4bit, quant_type="nf4", compute_dtype=torch.float32) if quantised else nn.Linear
        self.linear = kind(IN, OUT, bias=bias)
        self.is_loaded_in_4bit = quantised

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, which a model may change in place."""
        return self.linear(x).mul_(1)


def pair(dtype=torch.float32, bias=False, quantised=False, **options) -> tuple[PeftModel, PeftModel]:
    """Return PEFT's model and the fused one, with the same weights."""
    made = []
    given = {"r": RANK, "lora_alpha": 9, "target_modules": ["linear"], "init_lora_weights": False} | options
    for is_fused in (False, True):
        torch.manual_seed(0)
        config = LoraConfig(**given)
        if is_fused:
            config._register_custom_module(lora.layers(quantised))
        model = Layer(bias, quantised)
        made.append(get_peft_model(model.to("cpu") if quantised else model.to(dtype), config).to(dtype))
    return tuple(made)


def computed(model: PeftModel, shape=(2, 7, IN), dtype=torch.float32, with_input=True) -> list[torch.Tensor]:
    """Return the output and all gradients, those of the input and of both sides of the adapter.

    Of inputs and gradients that are rounded to bf16, so that they are the same in every dtype.
    """
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*shape, generator=generator).bfloat16().to(dtype).requires_grad_(with_input)
    torch.manual_seed(3)  # dropout's
    output = model(x)
    output.backward(torch.randn(output.shape, generator=generator).bfloat16().to(dtype))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    assert len(trained) == 2
    return [output.detach(), *([x.grad] if with_input else []), *(weight.grad for weight in trained)]


def far(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """Return the largest difference in roundings of the tensor's largest value."""
    assert [one.shape for one in some] == [one.shape for one in others] and all(one.abs().max() > 0 for one in others)
    pairs = zip(some, others, strict=True)
    return max(((a - b).abs().max() / b.abs().max() / torch.finfo(b.dtype).eps).item() for a, b in pairs)


CASES = {
    "plain": {},
    "bias": {"bias": True},
    "dropout": {"lora_dropout": 0.3},
    "rslora": {"use_rslora": True},
    "4 bits": {"quantised": True},
    "4 bits, bias and dropout": {"quantised": True, "bias": True, "lora_dropout": 0.3},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(IN,), (7, IN), (2, 7, IN)], ids=str)
def test_output_and_gradients_are_pefts(case, shape):
    theirs, ours = pair(**CASES[case])
    assert isinstance(ours.base_model.model.linear, lora.Fused)
    assert far(computed(ours, shape), computed(theirs, shape)) < ROUNDINGS


def test_in_evaluation_nothing_is_dropped():
    theirs, ours = (model.eval() for model in pair(lora_dropout=0.3))
    assert far(computed(ours), computed(theirs)) < ROUNDINGS
    assert Work.of(ours)["backward addmm_"] == 1


@pytest.mark.parametrize("case", [name for name in CASES if "4 bits" not in name])
def test_they_are_pefts_in_fp64_to_its_rounding(case):
    theirs, ours = pair(torch.float64, **CASES[case])
    both = [computed(model, dtype=torch.float64) for model in (ours, theirs)]
    assert far(*both) < ROUNDINGS


@pytest.mark.parametrize("case", CASES)
def test_an_input_without_a_gradient_gets_none(case):
    """As the first layer's; the base layer must not compute one for it."""
    theirs, ours = pair(**CASES[case])
    assert far(computed(ours, with_input=False), computed(theirs, with_input=False)) < ROUNDINGS
    assert not any(Work.of(ours, with_input=False)[name] for name in ("backward addmm_", "backward mm"))


def test_an_empty_batch_passes():
    _, ours = pair()
    output = ours(torch.zeros(0, IN, requires_grad=True))
    output.sum().backward()
    assert output.shape == (0, OUT)


def distance(some: list[torch.Tensor], others: list[torch.Tensor]) -> list[float]:
    """Return the root mean square of each tensor's difference, as a share of its own."""
    return [((a.float() - b).norm() / b.norm()).item() for a, b in zip(some, others, strict=True)]


@pytest.mark.parametrize("case", ["plain", "bias", "rslora"])
def test_bf16_is_as_near_to_fp32_as_pefts(case):
    """Nearer: the adapter's product is rounded once, with the sum, and not three times."""
    theirs, ours = pair(torch.bfloat16, **CASES[case])
    exact, _ = pair(**CASES[case])
    exact.load_state_dict({name: weight.float() for name, weight in theirs.state_dict().items()})
    shape = (4, 64, IN)
    expected = computed(exact, shape)
    near, far_off = (distance(computed(model, shape, torch.bfloat16), expected) for model in (ours, theirs))
    assert all(a < 0.95 * b for a, b in zip(near, far_off, strict=True)), (near, far_off)


# What is left to PEFT


def two_adapters(model: PeftModel) -> None:
    torch.manual_seed(4)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["linear"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])


LEFT = {
    "merged": lambda model: model.merge_adapter(),
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "two adapters": two_adapters,
    "adapters of another dtype": lambda model: (
        model.base_model.model.linear.lora_A.to(torch.float64)
        and model.base_model.model.linear.lora_B.to(torch.float64)
    ),
}


@pytest.mark.parametrize("state", LEFT)
def test_the_rest_is_pefts(state):
    outputs = []
    for model in pair():
        LEFT[state](model)
        outputs.append(model(torch.ones(3, IN)))
    assert torch.equal(*outputs) and outputs[0].abs().max() > 0


def test_adapters_by_example_and_autocast_are_pefts():
    theirs, ours = pair()
    x = torch.ones(3, IN)
    for model in (theirs, ours):
        model.eval()
    names = ["default", "__base__", "default"]
    mixed = [model.base_model.model.linear(x, adapter_names=names) for model in (theirs, ours)]
    assert torch.equal(*mixed) and not torch.equal(mixed[0][0], mixed[0][1])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(theirs.base_model.model.linear(x), ours.base_model.model.linear(x))


def test_compiled_layers_are_pefts():
    """Their compiler fuses scaling and addition, which it could not look into here."""
    theirs, ours = (model.base_model.model.linear for model in pair())
    x = torch.ones(3, IN, requires_grad=True)
    assert torch.equal(*(torch.compile(layer, backend="eager", fullgraph=True)(x) for layer in (theirs, ours)))


def test_an_output_that_somebody_needs_again_is_not_overwritten_unnoticed():
    _, ours = pair()
    layer = ours.base_model.model.linear
    layer.base_layer.register_forward_hook(lambda module, inputs, output: output.exp())  # whose backward reads it
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        layer(torch.ones(3, IN, requires_grad=True)).sum().backward()


# What is saved


def test_saved_and_merged_it_is_pefts(tmp_path):
    theirs, ours = pair(bias=True)
    for name, model in {"theirs": theirs, "ours": ours}.items():
        model.save_pretrained(tmp_path / name)
    settings = [read_json(tmp_path / name / "adapter_config.json") for name in ("theirs", "ours")]
    assert settings[0] == settings[1]
    again = PeftModel.from_pretrained(pair(bias=True)[0].unload(), tmp_path / "ours")
    assert type(again.base_model.model.linear) is PeftLinear
    assert far(computed(ours), computed(set_trainable(again))) < ROUNDINGS
    merged = [model.merge_and_unload().state_dict() for model in (theirs, ours)]
    assert merged[0].keys() == merged[1].keys() == {"linear.weight", "linear.bias"}
    assert all(torch.equal(weight, merged[1][name]) for name, weight in merged[0].items())


def set_trainable(model: PeftModel) -> PeftModel:
    """Return a model that was loaded for inference with adapters that have gradients."""
    for name, weight in model.named_parameters():
        weight.requires_grad_("lora_" in name)
    return model


# Passes over memory


class Work(TorchDispatchMode):
    """What writes a tensor of the input's or the output's size, by pass and operator; views write none."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.when, self.found = least, "forward", Counter()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        output = function(*arguments, **(options or {}))
        view = any(argument.alias_info and not argument.alias_info.is_write for argument in function._schema.arguments)
        if torch.is_tensor(output) and output.numel() >= self.least and not view:
            self.found[f"{self.when} {function._schema.name.removeprefix('aten::')}"] += 1
        return output

    @classmethod
    def of(cls, model: PeftModel, with_input: bool = True) -> Counter:
        """Return what a layer does for 64 tokens."""
        x = torch.ones(64, IN, requires_grad=with_input)
        layer = model.base_model.model.linear
        gradient = torch.ones(64, OUT)
        with cls(64 * IN) as work:
            output = layer(x)
            work.when = "backward"
            output.backward(gradient)
        return work.found


def test_nothing_is_left_but_products():
    theirs, ours = map(Work.of, pair())
    assert ours == {"forward mm": 1, "forward addmm_": 1, "backward mm": 1, "backward addmm_": 1}
    assert theirs == {
        "forward mm": 2, "forward mul": 1, "forward add": 1, "backward mul": 1, "backward mm": 2, "backward add": 1,
    }  # fmt: skip


def test_with_dropout_its_mask_and_the_sum_of_gradients_remain():
    theirs, ours = map(Work.of, pair(lora_dropout=0.3))
    assert theirs - ours == {"forward mm": 1, "forward mul": 1, "forward add": 1, "backward mul": 1}
    assert ours["backward mul"] == ours["backward add"] == 1


def test_4_bit_layers_copy_no_output():
    theirs, ours = map(Work.of, pair(quantised=True))
    assert theirs["forward clone"] == 1 and not ours["forward clone"]
    assert not ours["forward add"] and not ours["forward mul"] and not ours["backward mul"] and not ours["backward add"]


# Runs

SETTINGS = plain.Settings()
SEED = 42
LORA = Lora(rank=4, alpha=12, fused=True)
PARTITIONED = {"stage3_param_persistence_threshold": 0}
"""Keys of ZeRO-3 with which it shards weights as small as an adapter's."""
RUNS = {
    "zero2": ("zero2.json", {}),
    "zero2, checkpointing": ("zero2.json", {"gradient_checkpointing": True}),
    "zero3": ("zero3.json", {}),
    "zero3, checkpointing": ("zero3.json", {"gradient_checkpointing": True}),
    "zero3, feed-forward layers again": ("zero3.json", {"gradient_checkpointing": "feed_forward"}),
    "zero3, tiles": ("zero3.json", {"tiled_mlp": True, "gradient_checkpointing": True}),
    "zero3, 4 bits": ("zero3_adapters.json", {"gradient_checkpointing": True}),
    "zero2, 4 bits": ("zero2.json", {}),
    "zero3, offloaded": ("zero3_offload_params.json", {}),
    "zero3, rslora": ("zero3.json", {"lora": replace(LORA, rslora=True)}),
    "zero3, two micro-batches": ("zero3.json", {"micro_batch_size": 2}),
    "zero2, sequence": ("zero2.json", {"layout": Layout(sequence=2), "micro_batch_size": 8}),
    "pipeline": ("zero1.json", {"layout": Layout(pipeline=2), "micro_batch_size": 1, "gradient_checkpointing": True}),
}


@pytest.fixture(scope="module")
def reference(model_folder, conversations):
    """Return a function that trains PEFT's adapters with plain PyTorch, once for each kind of weights and adapters."""
    kept = {}

    def train(quantised: bool, lora: Lora):
        if (quantised, lora) not in kept:

            def prepare(whole):
                base = in_4_bits(model_folder) if quantised else whole
                return adapters.add(base, replace(lora, fused=False), SEED)

            kept[quantised, lora] = plain.train(model_folder, conversations, SETTINGS, prepare=prepare)
        return kept[quantised, lora]

    return train


def in_4_bits(folder) -> nn.Module:
    """Return the model with 4-bit weights, in training: in evaluation bitsandbytes multiplies in bf16 on some CPUs."""
    nf4 = adapters.nf4(torch.float32)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=nf4).train()


@pytest.fixture
def train(ranks, tmp_path, model_folder, conversations):
    """Return a function that trains one of RUNS on two ranks."""

    def run(name: str, function=worker.main, **others) -> RunFolder:
        config, changes = RUNS[name]
        number = len(list(tmp_path.iterdir()))
        file = with_zero(tmp_path, config, **(PARTITIONED if "zero3" in config else {}))
        quantization = "nf4" if "4 bits" in name else "none"
        recipe = gate.recipe_for(SETTINGS, model_folder, conversations, file, lora=LORA, seed=SEED)
        model = Model(path=str(model_folder), quantization=quantization)
        recipe = replace(recipe, model=model, **changes | others)
        return run_on(ranks, recipe, tmp_path, name=f"run-{number}", function=function)

    return run


def test_a_run_exports_an_ordinary_adapter(train, reference, model_folder, tmp_path):
    run = train("zero2")
    gate.agree_on_adapters(run, *reference(False, LORA))
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, run.export)
    assert type(adapted.base_model.model.model.layers[0].self_attn.q_proj) is PeftLinear
    assert export_script.main([str(run.path), "--output", str(tmp_path / "merged"), "--merge"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).state_dict()
    for name, weight in adapted.merge_and_unload().state_dict().items():
        assert torch.allclose(merged[name], weight, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("name", tiered(RUNS, {"zero3, checkpointing", "zero3, 4 bits"}))
def test_runs_train_pefts_adapters(train, reference, name):
    if name == "pipeline":
        run = train(name, training_run.main)
    else:
        run = train(name)
        found = read_json(worker.path_of(run))
        assert found["changed"] == [] and found["moved"]
        assert found["layers"] == ["FusedLinear4bit" if "4 bits" in name else "FusedLinear"]
        assert found["adapters_held"] == pytest.approx(0.5 if "zero3" in name else 1, abs=0.01)
    gate.agree_on_adapters(run, *reference("4 bits" in name, RUNS[name][1].get("lora", LORA)))


@pytest.mark.every
@pytest.mark.parametrize(
    ("within", "changes"),
    [
        (gate.LOSS, {"lora": replace(LORA, dropout=0.2), "gradient_checkpointing": True}),
        (gate.LOSS, {"lora": replace(LORA, init="pissa"), "learning_rate": 2e-4}),
        (1e-2, {"precision": "bf16", "gradient_checkpointing": True, "learning_rate": 1e-3}),
    ],
    ids=["dropout", "pissa", "bf16"],
)
def test_runs_with_and_without_it_are_the_same(train, within, changes):
    """In bf16 to two of its roundings, 0.4 % each."""
    lora = changes.get("lora", LORA)
    runs = [train("zero3", **changes | {"lora": replace(lora, fused=fused)}) for fused in (True, False)]
    assert [read_json(worker.path_of(run))["layers"] for run in runs] == [["FusedLinear"], ["Linear"]]
    for ours, theirs in zip(*(read_jsonl(run.metrics) for run in runs), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=within)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=10 * within)


MISTAKES = (mistakes.unscaled_outputs, mistakes.unscaled_gradients, mistakes.overwritten_gradients)


@pytest.mark.parametrize("mistake", tiered(MISTAKES, MISTAKES[2:]), ids=lambda one: one.__name__)
def test_a_run_that_computes_something_else_is_noticed(train, reference, mistake):
    """One whose outputs are wrong does not end well: its export computes something else."""
    with pytest.raises(AssertionError):
        gate.agree_on_adapters(train("zero3, checkpointing", mistake), *reference(False, LORA))
