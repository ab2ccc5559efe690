"""A merged model computes what the adapter computes on its base model, also where head and embedding share a weight.

ds-recipes export --add: the sum of adapters is the sum of what each of them changes.
"""

import shutil

import pytest
import torch
from peft import LoraConfig, LoraModel, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepspeed_recipes.commands.main import run as run_command
from deepspeed_recipes.export import weighted_sum
from deepspeed_recipes.prove import techniques
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.run_folder import read_json, write_json
from deepspeed_recipes.recipe.samples import TINY_MODEL
from deepspeed_recipes.training import export
from deepspeed_recipes.training.model_folder import base_model

IDS = torch.arange(5, 25)[None]
ADAPTERS = {
    "inside": {"target_modules": ["q_proj"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"], "use_rslora": True},
    "dora": {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
    "saved_head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "saved_embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [7, 9]},
}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def base(request, tmp_path_factory):
    return techniques.random_qwen3(tmp_path_factory.mktemp("base"), tie_word_embeddings=request.param)


def trained(base, folder, settings):
    """Write an adapter with random values; return its logits on the base model."""
    loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = get_peft_model(loaded, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **settings))
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=random) * 0.05)
    adapted.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder)
    with torch.no_grad():
        return again.eval()(input_ids=IDS).logits


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_merged_model_has_the_adapters_logits(kind, base, tmp_path):
    expected = trained(base, tmp_path / "adapter", ADAPTERS[kind])
    for file in (tmp_path / "adapter").glob("*token*.json"):  # as plain PEFT saves an adapter
        file.unlink()
    export.write(tmp_path / "adapter", tmp_path / "merged", merge=True)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        found = plain(input_ids=IDS).logits
    assert (found - expected).abs().max() / expected.abs().max() < 1e-4
    tied = [read_json(folder / "config.json")["tie_word_embeddings"] for folder in (base, tmp_path / "merged")]
    assert tied[1] == (tied[0] and kind in ("inside", "tokens")), "an adapter on one of them makes two weights of one"


@pytest.mark.filterwarnings("ignore")
def test_a_merge_into_the_shared_weight_is_noticed(tmp_path, monkeypatch):
    base = techniques.random_qwen3(tmp_path / "base")
    trained(base, tmp_path / "adapter", ADAPTERS["embedding"])
    monkeypatch.setattr(export, "_part_tied", lambda model: None)
    with pytest.raises(RuntimeError, match="merged, its logits differ"):
        export.write(tmp_path / "adapter", tmp_path / "merged", merge=True)
    assert not (tmp_path / "merged").exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("saved", [None, ["embed_tokens"], ["embed_tokens", "lm_head"]])
def test_an_adapter_on_a_larger_vocabulary_is_merged_with_its_rows(base, saved, tmp_path):
    larger = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    larger.resize_token_embeddings(larger.config.vocab_size + 3)
    adapted = get_peft_model(larger, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=saved))
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    export.write(tmp_path / "adapter", tmp_path / "merged", merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        found, expected = (model.eval()(input_ids=IDS).logits for model in (merged, adapted))
    assert found.shape == expected.shape and (found - expected).abs().max() / expected.abs().max() < 1e-4


WRONG = {
    "half of it": ({}, lambda held: dict(list(held.items())[::2]), {}, "tensors the file lacks (2, such as"),
    "more than it": (
        {},
        lambda held: held | {"base_model.model.x.lora_A.weight": held[next(iter(held))].clone()},
        {},
        "(1, ",
    ),
    "fewer layers": ({}, None, {"layers_to_transform": [1]}, "tensors without a place in"),
    "more layers": ({}, None, {"target_modules": ["q_proj", "o_proj"]}, "tensors the file lacks (4, "),
    "another rank": ({}, None, {"r": 8}, "size mismatch for base_model.model.model.layers.0"),
    "no scale": ({}, None, {"lora_alpha": None}, "PEFT cannot put this adapter on"),
    "an unknown kind": ({}, None, {"peft_type": "MINE"}, "KeyError: 'MINE'"),
    "no base": ({}, None, {"base_model_name_or_path": None}, "base_model_name_or_path=None: write the folder or"),
    "not finite": (
        {},
        lambda held: {name: one / 0 for name, one in held.items()},
        {},
        "has values that are not finite",
    ),
    "some tokens": ({"alora_invocation_tokens": [5]}, None, {}, "it acts on some tokens only"),
    "a bias": ({"lora_bias": True}, None, {}, "lora_bias=true adds a bias to layers that have none"),
    "at random": ({"init_lora_weights": "pissa_niter_4"}, None, {}, "takes a random part of the base model away"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", WRONG)
def test_an_adapter_that_does_not_fit_is_refused_in_a_line(kind, tmp_path):
    settings, damaged, changes, said = WRONG[kind]
    folder = tmp_path / "adapter"
    trained(techniques.random_qwen3(tmp_path / "base"), folder, {"target_modules": ["q_proj"], **settings})
    write_json(folder / "adapter_config.json", read_json(folder / "adapter_config.json") | changes)
    if damaged:
        save_file(damaged(load_file(folder / "adapter_model.safetensors")), folder / "adapter_model.safetensors")
    with pytest.raises(UserError) as caught:
        export.write(folder, tmp_path / "merged", merge=True)
    assert str(caught.value).startswith(str(folder)) and said in str(caught.value)
    assert "\n" not in str(caught.value) and not (tmp_path / "merged").exists()


PLACES = [
    ("first", 4, 8, ["q_proj", "v_proj"]),
    ("second", 2, 4, ["q_proj", "down_proj"]),
    ("dora", 2, 4, ["q_proj"]),
]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Write random adapters of different ranks on different matrices."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, (name, rank, alpha, modules) in enumerate(PLACES):
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules, task_type="CAUSAL_LM")
        config.use_dora = name == "dora"
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(TINY_MODEL), config)
        model.save_pretrained(folder / name)
        numbers = torch.Generator().manual_seed(seed)
        weights = load_file(folder / name / "adapter_model.safetensors")
        drawn = {key: 0.05 * torch.randn(value.shape, generator=numbers) for key, value in weights.items()}
        save_file(drawn, folder / name / "adapter_model.safetensors", metadata={"format": "pt"})
        AutoTokenizer.from_pretrained(TINY_MODEL).save_pretrained(folder / name)
    return folder


def weights(model):
    return {name: value.detach() for name, value in model.named_parameters()}


def whole(adapter):
    base = AutoModelForCausalLM.from_pretrained(TINY_MODEL)
    return weights(PeftModel.from_pretrained(base, adapter).merge_and_unload())


def add(adapters, tmp_path, *words):
    words = ["--add", f"{adapters / 'second'}=-0.5", "--weight", "2", "--output", str(tmp_path / "out"), *words]
    return run_command("export", [str(adapters / "first"), *words])


@pytest.mark.parametrize("merge", [[], ["--merge"]])
def test_the_sum_is_what_the_parts_change_times_their_weights(adapters, tmp_path, merge):
    assert add(adapters, tmp_path, *merge) == 0
    out = tmp_path / "out"
    found = weights(AutoModelForCausalLM.from_pretrained(out)) if merge else whole(out)
    base = weights(AutoModelForCausalLM.from_pretrained(TINY_MODEL))
    first, second = whole(adapters / "first"), whole(adapters / "second")
    moved = 0
    for name, value in base.items():
        expected = value + 2 * (first[name] - value) - 0.5 * (second[name] - value)
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-5)
        moved += bool((expected - value).abs().max() > 1e-2)
    assert moved == 12  # three kinds of matrices in four layers
    assert (out / "adapter_config.json").exists() != bool(merge)
    assert "| second | -0.5 |" in (out / "README.md").read_text()
    if not merge:
        assert read_json(out / "adapter_config.json")["r"] == 6
        assert read_json(out / "adapter_config.json")[base_model.KEY] == "src/deepspeed_recipes/samples/tiny_model"
    assert not list(tmp_path.glob("tmp*")) and not list(tmp_path.glob("*.part"))


def test_a_sum_that_is_not_that_of_its_parts_is_not_written(adapters, tmp_path, monkeypatch):
    """The mistake: the first adapter's weight is left out."""
    ours = LoraModel.add_weighted_adapter

    def without_weight(self, names, factors, *rest, **options):
        return ours(self, names, [1.0, *factors[1:]], *rest, **options)

    monkeypatch.setattr(LoraModel, "add_weighted_adapter", without_weight)
    with pytest.raises(RuntimeError, match="the sum of the adapters differs by"):
        add(adapters, tmp_path)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("tmp*"))


def test_bad_input_is_answered_in_a_line(adapters, tmp_path, refusal):
    other = tmp_path / "other"
    shutil.copytree(adapters / "second", other)
    write_json(
        other / "adapter_config.json", read_json(other / "adapter_config.json") | {base_model.KEY: "OWNER/OTHER"}
    )
    scaled = shutil.copytree(adapters / "second", tmp_path / "scaled")
    write_json(scaled / "adapter_config.json", read_json(scaled / "adapter_config.json") | {"use_rslora": True})
    first, out = str(adapters / "first"), str(tmp_path / "out")
    for words, said in (
        ([first, "--add", f"{scaled}=1", "--output", out], "use_rslora: only plain LoRA"),
        ([first, "--add", "second", "--output", out], "write RUN=WEIGHT"),
        ([first, "--add", f"{adapters / 'second'}=much", "--output", out], "write RUN=WEIGHT"),
        ([first, "--add", f"{other}=1", "--output", out], "an adapter for OWNER/OTHER"),
        ([first, "--add", f"{adapters / 'dora'}=1", "--output", out], "use_dora: only plain LoRA"),
        ([first, "--add", f"{TINY_MODEL}=1", "--output", out], "not an adapter"),
        ([first, "--weight", "2", "--output", out], "--weight 2: only for a sum"),
    ):
        printed = refusal("export", *words)
        assert said in printed and len(printed.splitlines()) == 1, printed
    assert export.load(adapters / "first") and weighted_sum.TOLERANCE < 1e-3
