"""`ds-recipes launch auto MODEL`: a model without a page borrows the nearest one's recipe and says so.

A recipe on a model that it was not made for: said at launch, with the recipe that fits.
"""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from deepspeed_recipes.commands import launch
from deepspeed_recipes.commands.launch import borrowed
from deepspeed_recipes.launching import paths
from deepspeed_recipes.planning.model_profile.lookup import profile_of
from deepspeed_recipes.planning.search import model_recipe
from deepspeed_recipes.planning.search.model_recipe import nearest
from deepspeed_recipes.recipe import overrides, pages, run_folder
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.project import SAMPLES
from deepspeed_recipes.recipe.recipe import Draft
from deepspeed_recipes.recipe.run_folder import RunFolder, read_json, read_jsonl
from deepspeed_recipes.training.model import draft
from tests import launching

WIDTHS = {"hidden_size": 768, "num_hidden_layers": 4, "num_attention_heads": 12, "num_key_value_heads": 4}


def dimensions(kind, **sizes):
    """Return a configuration of an architecture, as a config.json has it."""
    return json.loads(AutoConfig.for_model(kind, **sizes).to_json_string(use_diff=False))


def drafted(folder, kind, **sizes):
    """Write a small random model of an architecture with a tokenizer, and return its folder."""
    page = pages.find("llama3-1b", "full")
    config = {"model_type": kind, **sizes}
    draft.write(replace(page, model=replace(page.model, config=config), draft=Draft(True)), folder, torch.float32)
    return folder


NO_PAGE = {
    "cohere": "neither experts nor linear attention",
    "flex_olmo": "experts",
    "helium": "neither experts nor linear attention",
    "olmo2": "neither experts nor linear attention",
    "qwen3_next": "experts",
}
"""Architectures of transformers that no page has, and what they consist of."""


def test_no_page_has_them():
    kinds = {recipe.model.config.get("model_type") for recipe in pages.listing()}
    assert not kinds & set(NO_PAGE)


@pytest.mark.parametrize("kind", NO_PAGE)
def test_experts_borrow_from_experts_and_others_from_others(kind):
    found = nearest(
        dimensions(kind, **WIDTHS, num_experts=16) if NO_PAGE[kind] == "experts" else dimensions(kind), "lora"
    )
    mixture = bool(found.lora.target_parameters)
    assert mixture == (NO_PAGE[kind] == "experts"), found.name


def test_what_mixes_tokens_beside_attention_is_borrowed_from_its_like():
    """Else a decoder of 7.6B would take over Falcon-H1's adapters, and train without packing."""
    for name, mixer in (("falcon_h1-7b", "mamba"), ("lfm2-1.2b", "conv_L")):
        keys = pages.find(name, "full").model.config
        assert {one for one in model_recipe.MIXERS if any(one in key for key in keys)} == {mixer}
    falcon = profile_of(pages.find("falcon_h1-7b", "full").model.config).parameters
    plain = {"hidden_size": 4096, "intermediate_size": 14592, "num_hidden_layers": 32, "vocab_size": 100_000}
    decoder = dimensions("helium", **plain, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    found = nearest(decoder, "lora")
    assert abs(profile_of(decoder).parameters / falcon - 1) < 0.2
    assert found.packing and found.family != "falcon_h1"


def test_size_counts_within_an_architecture_and_architecture_within_ten_times_the_size():
    small, large = (pages.find(f"qwen3-{size}", "full").model.config for size in ("0.6b", "32b"))
    assert nearest({**small, "num_hidden_layers": 20}, "full").name == "qwen3-0.6b-full"
    assert nearest({**large, "num_hidden_layers": 50}, "full").name == "qwen3-32b-full"
    neox = dict(pages.find("gpt_neox-20b", "full").model.config)
    assert nearest({**neox, "num_hidden_layers": 20}, "full").family == "gpt_neox"
    far = nearest({**neox, "num_hidden_layers": 6, "hidden_size": 512, "intermediate_size": 2048}, "full")
    assert far.family != "gpt_neox" and far.model.parameters < 10**9


def test_another_architecture_has_its_own_attention_and_template(tmp_path):
    folder = drafted(tmp_path, "olmo2")
    recipe = borrowed.borrow(str(folder), "full")
    assert (recipe.model.attention, recipe.model.chat_template) == ("auto", "auto")
    assert recipe.model.path == str(folder) and recipe.model.config["model_type"] == "olmo2"
    page = pages.find(pages.typed(recipe), "full")
    assert (recipe.learning_rate, recipe.global_batch_size) == (page.learning_rate, page.global_batch_size)
    text = borrowed.said(recipe, [])
    assert f"{folder} (olmo2, " in text and f"borrows the recipe {pages.typed(page)} full" in text
    assert f"learning_rate={page.learning_rate}" in text and f"deepspeed={page.deepspeed}" in text
    assert "other variants: lora" in text and "its own" not in text, "nothing but the model differs"
    assert "learning_rate" not in borrowed.said(recipe, ["learning_rate"]), "the user's is not borrowed"


def test_documents_are_packed_only_where_they_stay_apart(tmp_path, monkeypatch):
    """Bamba's state runs on from one document to the next; OLMo 2 tells them apart."""
    (tmp_path / "config.json").write_text(json.dumps(dimensions("bamba")))
    find = model_recipe.find  # bamba's nearest page does not pack, whatever the test of its architecture says
    monkeypatch.setattr(model_recipe, "find", lambda *words, **how: replace(find(*words, **how), packing=True))
    assert not borrowed.borrow(str(tmp_path), "lora").packing
    assert borrowed.borrow(str(drafted(tmp_path / "other", "olmo2")), "lora").packing


@pytest.mark.every
@pytest.mark.parametrize(("kind", "words"), [("olmo2", []), ("flex_olmo", ["full"])])
def test_a_model_without_a_page_trains_at_the_first_try(launcher, tmp_path, kind, words):
    folder = drafted(tmp_path / "model", kind)
    data = tmp_path / "data.jsonl"
    data.write_text((SAMPLES / "extract" / "train.jsonl").read_text() + '{"messages": []}\nnot JSON\n')
    changes = [f"data.path={data}", "data.max_examples=64", "max_steps=6", "global_batch_size=8", "sequence_length=256"]
    changes.append("data.bad=skip")
    changes.append("learning_rate=1e-2")  # random weights learn nothing in six steps at a page's
    command = [*launcher, "auto", str(folder), *words, *changes, "wandb.mode=disabled", "logging_steps=1"]
    output = launching.run([*command, "--gpus", "2", "--output-dir", str(tmp_path / "run")], tmp_path)
    assert f"auto: {folder} ({kind}, " in output and "borrowed: learning_rate=" in output
    run = RunFolder(tmp_path / "run")
    losses = [row["loss"] for row in read_jsonl(run.metrics)]
    assert len(losses) == 6 and losses[-1] < losses[0]
    summary = read_json(run.summary)
    assert summary["logit_difference"] <= 3e-2 and summary["recipe"].startswith("model-")
    assert summary["skipped"][str(data)]["count"] == 2 and "left out     2 bad examples" in output
    assert Counter(row["step"] for row in read_jsonl(run.answers)) == {0: 3, 6: 3}
    report = run.report_page.read_text()
    assert f"2 examples of {data} were left out" in report and "<h2>Answers before and after" in report
    assert read_json(run.recipe)["lora"] is None if words else read_json(run.recipe)["lora"]["rank"]


def test_a_model_that_a_page_has_takes_its_recipe_as_it_is(printed_by):
    assert borrowed.borrow("Qwen/Qwen3-8B", "lora") == pages.find("qwen3-8b", "lora")
    said = printed_by("launch", "auto", "Qwen/Qwen3-8B", "learning_rate=1e-5", "--draft", "--dry-run")
    assert "borrows the recipe qwen3-8b lora" in said and "own: " not in said
    assert "learning_rate: 0.0002 -> 1e-05" in said


def test_a_run_has_the_name_of_the_users_model(tmp_path):
    folder = drafted(tmp_path / "My Model", "olmo2")
    recipe = borrowed.borrow(str(folder), "full")
    assert recipe.name == "My_Model-full" and pages.typed(recipe).startswith(recipe.family)
    assert run_folder.new(recipe, None).path.parent.name == "My_Model-full"
    cached = tmp_path / "models--us--Olmo-X" / "snapshots" / "0123abcd"
    cached.parent.mkdir(parents=True)
    folder.rename(cached)
    assert borrowed.borrow(str(cached), "lora").name == "Olmo-X-lora"


def test_a_model_with_a_vision_tower_takes_a_page_with_one(tmp_path):
    for page in ("qwen2_5_vl-7b", "gemma3_vision-4b"):
        (tmp_path / "config.json").write_text(json.dumps(dict(pages.find(page, "lora").model.config)))
        recipe = borrowed.borrow(str(tmp_path), "lora")
        assert pages.typed(recipe) == page and recipe.model.vision and recipe.model.path == str(tmp_path)


def test_a_model_with_its_own_code_is_told_how(tmp_path, refusal):
    own = {"model_type": "foo", "auto_map": {"AutoModelForCausalLM": "modeling_foo.Foo"}, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(own | WIDTHS))
    error = refusal("launch", "auto", tmp_path, "--dry-run")
    assert f"lora model.path={tmp_path} model.trust_remote_code=true" in error


def test_a_model_without_auto_is_told_of_it(tmp_path, monkeypatch, refusal):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for model in ("mine", "us/mine", str(tmp_path / "mine")):
        assert f"ds-recipes launch auto {model} lora" in refusal("launch", model, "lora", "--dry-run")


def test_adapters_on_a_recipe_of_all_weights_learn_at_the_rate_of_adapters(capsys):
    full, lora = (pages.find("llama3-8b", variant) for variant in ("full", "lora"))
    assert overrides.apply(full, ["lora.rank=8"]).learning_rate == lora.learning_rate
    assert overrides.apply(full, ["lora.rank=8", "learning_rate=3e-5"]).learning_rate == 3e-5
    assert overrides.apply(lora, ["lora.rank=8"]).learning_rate == lora.learning_rate
    grpo = pages.find("llama3-8b", "grpo")
    ratio = lora.learning_rate / full.learning_rate
    assert overrides.apply(grpo, ["lora.rank=8"]).learning_rate == pytest.approx(ratio * grpo.learning_rate)
    assert launch.main(["llama3-8b", "full", "lora.rank=8", "--draft", "--dry-run"]) == 0
    shown = capsys.readouterr().err
    assert "adapters on a recipe of all weights: learning_rate=0.0001 instead of 1e-05" in shown
    assert (
        "lora.rank=8: lora.alpha stays 32, so adapters are scaled by 4 (alpha / rank) instead of 2; lora.alpha=16"
        in shown
    )
    for other in (["lora.rank=16"], ["lora.rank=8", "lora.alpha=32"], ["lora.rank=8", "lora.rslora=true"]):
        assert launch.main(["llama3-8b", "lora", *other, "--draft", "--dry-run"]) == 0
        assert "lora.alpha stays" not in capsys.readouterr().err


def test_a_draft_without_gpus_is_small(capsys):
    assert launch.main(["llama3-8b", "full", "--draft", "--dry-run", "full", "--gpus", "2"]) == 0
    shown = capsys.readouterr()
    assert "draft without GPUs: global_batch_size=4 sequence_length=512" in shown.err
    assert '"global_batch_size": 4' in shown.out
    words = ["global_batch_size=16", "sequence_length=1024"]
    assert launch.main(["llama3-8b", "full", "--draft", "--dry-run", *words]) == 0
    assert "draft without GPUs" not in capsys.readouterr().err


def test_plans_borrow_the_same_page(tmp_path, printed_by):
    (tmp_path / "config.json").write_text(json.dumps(dimensions("olmo2")))
    answer = json.loads(printed_by("plan", tmp_path, "--method", "lora", "--gpu", "H100", "--json"))
    assert (
        answer["plans"][0]["fits"]
        and answer["model"]["parameters"] == borrowed.borrow(str(tmp_path), "lora").model.parameters
    )


def test_a_run_of_another_model_is_not_resumed(tmp_path, monkeypatch):
    one, other = (drafted(tmp_path / name, "olmo2") for name in ("one", "other"))
    run = RunFolder(tmp_path / "run")
    monkeypatch.setattr(run_folder, "to_resume", lambda *_: run)
    run_folder.write_recipe(run, paths.locate(borrowed.borrow(str(one), "lora")))
    with pytest.raises(UserError, match=f"has a run of {one}, not of {other}"):
        launch.main(["auto", str(other), "--resume"])
    with pytest.raises(UserError, match="has a run of"):
        launch.main(["auto", "Qwen/Qwen3-0.6B", "--resume"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "auto: name a model folder or a Hub id; ds-recipes launch auto MODEL"),
        (["learning_rate=1e-5"], "auto: name a model"),
        (["somewhere/model", "lora", "full"], "auto: too many words: full"),
        (["no/such/folder"], "no/such/folder: no such file or folder"),
        (["us/nowhere"], "us/nowhere: cannot read its config.json"),
        (
            [str(SAMPLES / "tiny_model"), "loraa"],
            "loraa: no page of a decoder has this variant; choose from: full, lora",
        ),
        ([str(SAMPLES / "tiny_model"), "lora", "model.path=x"], "auto takes the model as its first word"),
    ],
)
def test_a_mistake_is_answered_in_a_line(refusal, words, said):
    error = refusal("launch", "auto", *words, "--dry-run")
    assert said in error and len(error.splitlines()) <= 2


def test_what_is_not_a_decoder_is_refused(tmp_path, refusal):
    (tmp_path / "config.json").write_text(json.dumps(dimensions("t5")))
    assert "t5 is an encoder-decoder; plans are for decoders only" in refusal("launch", "auto", tmp_path, "--dry-run")
    mixture = dimensions("flex_olmo", **WIDTHS, num_experts=16)
    with pytest.raises(
        UserError, match="qlora: no page of a mixture of experts has this variant; choose from: full, lora"
    ):
        nearest(mixture, "qlora")


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
