"""A recipe on a model that it was not made for: said at launch, with the recipe that fits."""

import json

import pytest

from deepspeed_recipes.commands import launch
from deepspeed_recipes.commands.launch import borrowed
from deepspeed_recipes.recipe import overrides, pages
from deepspeed_recipes.recipe.project import SAMPLES


def said(recipe, variant, *words):
    page = pages.find(recipe, variant)
    return borrowed.warning(overrides.apply(page, words), page, overrides.keys_of(words))


def test_a_recipe_of_a_tiny_model_is_not_lent_to_a_large_one():
    text = said("tiny", "lora", "model.path=Qwen/Qwen2.5-7B-Instruct")
    assert "learning_rate=0.004 precision=fp32 sequence_length=256 are the settings of tiny-3m" in text
    assert "qwen3 with 3.05M parameters; Qwen/Qwen2.5-7B-Instruct is qwen2 with 7.62B parameters" in text
    assert text.endswith("\nWhat fits: ds-recipes launch qwen2_5-7b lora model.path=Qwen/Qwen2.5-7B-Instruct")
    assert "; Qwen/Qwen1.5-7B is about 7.00B parameters" in said("tiny", "lora", "model.path=Qwen/Qwen1.5-7B")


@pytest.mark.parametrize(
    ("recipe", "model", "fits"),
    [
        ("tiny", "meta-llama/Llama-3.1-70B", "llama3-70b full"),
        ("llama3-8b", pages.find("mistral-7b", "full").model.path, "mistral-7b full"),
        ("llama3-70b", "unsloth/Llama-3.2-1B", "llama3-1b full"),
        ("tiny", "Qwen/Qwen1.5-7B", "qwen2_5-7b full"),
        ("gpt2-124m", "facebook/opt-30b", "Set these for your model"),
    ],
)
def test_what_fits_is_named(recipe, model, fits):
    assert fits in said(recipe, "full", f"model.path={model}")


def test_a_model_like_the_pages_needs_no_warning():
    assert said("llama3-8b", "full", "model.path=unsloth/Llama-3.1-8B") is None
    assert said("llama3-8b", "full", "model.path=someone/finetune") is None, "nothing is known of it"
    assert said("tiny", "full", f"model.path={SAMPLES}/tiny_model") is None
    assert said("tiny", "full", "learning_rate=1e-5") is None
    settings = ("learning_rate=1e-5", "precision=bf16", "sequence_length=2048")
    assert said("tiny", "full", "model.path=Qwen/Qwen2.5-7B", *settings) is None
    assert "learning_rate" not in said("tiny", "full", "model.path=Qwen/Qwen2.5-7B", *settings[:1])


def test_a_folder_is_counted_and_a_damaged_one_is_left_to_the_ranks(tmp_path):
    assert borrowed.look(f"{SAMPLES}/tiny_model") == borrowed.Found(("qwen3",), 3_049_984)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}})
    )
    for content in (b"", b"\x05\0\0\0\0\0\0\0[1]  ", b"\xff" * 20, b"\x02\0\0\0\0\0\0\0{}"):
        (tmp_path / "model.safetensors").write_bytes(content)
        assert borrowed.look(str(tmp_path)) == borrowed.Found(("gemma3", "gemma3_text"), None)
    assert said("gemma3-4b", "full", f"model.path={tmp_path}") is None, "its text model is the page's"


def test_the_launcher_says_it(capsys):
    assert launch.main(["tiny", "lora", "model.path=Qwen/Qwen2.5-7B-Instruct", "--dry-run"]) == 0
    assert "What fits: ds-recipes launch qwen2_5-7b lora" in capsys.readouterr().out
    assert launch.main(["tiny", "lora", "--draft", "model.path=Qwen/Qwen2.5-7B-Instruct", "--dry-run"]) == 0
    assert "borrowed" not in capsys.readouterr().out
