"""ds-recipes export --add: the sum of adapters is the sum of what each of them changes."""

import shutil

import pytest
import torch
from peft import LoraConfig, LoraModel, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepspeed_recipes.commands.main import run as run_command
from deepspeed_recipes.export import weighted_sum
from deepspeed_recipes.recipe.run_folder import read_json, write_json
from deepspeed_recipes.recipe.samples import TINY_MODEL
from deepspeed_recipes.training import export
from deepspeed_recipes.training.model_folder import base_model

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


def test_bad_input_is_answered_in_a_line(adapters, tmp_path, capsys):
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
        assert run_command("export", words) == 2
        printed = capsys.readouterr().err
        assert said in printed and len(printed.splitlines()) == 1, printed
    assert export.load(adapters / "first") and weighted_sum.TOLERANCE < 1e-3
