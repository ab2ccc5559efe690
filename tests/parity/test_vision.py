"""Models that see: ZeRO on two ranks trains what plain PyTorch trains, whichever ranks have pictures."""

import shlex
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from deepspeed_recipes.commands.main import run as run_command
from deepspeed_recipes.prove.techniques import Settings
from deepspeed_recipes.recipe.recipe import Lora
from deepspeed_recipes.recipe.run_folder import RunFolder, read_json, read_jsonl, write_recipe
from deepspeed_recipes.training import export
from tests import seeing
from tests.parity import gate, plain
from tests.ranks import read_logs, run_on
from tests.tiers import tiered
from tests.workers import mistakes

SETTINGS = Settings(steps=4, learning_rate=3e-3)
"""Adam moves a weight whose gradient is rounding like any other: at 1e-2 one of Qwen's tower is off by 1.2 bounds."""
SHOWN = {"all": range(8), "one": [5], "none": []}
"""Which of the eight conversations have pictures: those of all ranks, one of one rank, none."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return the folder of a random model of each kind, made once."""
    return seeing.models(tmp_path_factory)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shown")
    return {name: seeing.write_conversations(folder / name, shown) for name, shown in SHOWN.items()}


CASES = [
    (kind, shown, deepspeed)
    for kind in seeing.KINDS
    for shown in SHOWN
    for deepspeed in ("zero0.json", "zero1.json", "zero2.json", "zero3.json")
]


@pytest.mark.parametrize("train_vision", [False, pytest.param(True, marks=pytest.mark.every)])
@pytest.mark.parametrize(
    ("kind", "shown", "deepspeed"),
    tiered(CASES, {("gemma3", "one", "zero3.json"), ("qwen2_5_vl", "one", "zero3.json")}),
)
def test_same_model_as_plain_pytorch(ranks, tmp_path, capsys, models, data, kind, shown, deepspeed, train_vision):
    recipe = seeing.recipe_for(
        models(kind), data[shown], deepspeed, SETTINGS, train_vision=train_vision, micro_batch_size=2
    )
    run = run_on(ranks, recipe, tmp_path)
    records, weights = seeing.plain_train(models(kind), data[shown], SETTINGS, train_vision)
    gate.agree_on_steps(run, records, norms=gate.NORM)
    assert read_json(run.export / "processor_config.json") == read_json(models(kind) / "processor_config.json")
    exported = AutoModelForImageTextToText.from_pretrained(run.export, dtype=torch.float32).state_dict()
    assert set(exported) == set(weights)
    gate.near(exported, weights)
    assert answered(tmp_path / "log", capsys) == (shown != "none")


@pytest.mark.parametrize(
    ("kind", "examples", "deepspeed"),
    tiered(
        [(kind, count, f"zero{stage}.json") for kind in seeing.KINDS for count in (7, 5, 1) for stage in (0, 3)],
        {("gemma3", 5, "zero3.json")},
    ),
)
def test_an_epoch_that_ranks_cannot_share_evenly_counts_every_example_once(
    ranks, tmp_path, models, data, kind, examples, deepspeed
):
    few = data["all"].with_name("few.jsonl")  # beside the images
    few.write_text("".join(data["all"].read_text().splitlines(keepends=True)[:examples]))
    run = run_on(ranks, seeing.recipe_for(models(kind), few, deepspeed, SETTINGS, micro_batch_size=2), tmp_path)
    gate.agree_on_steps(run, seeing.plain_train(models(kind), few, SETTINGS)[0], norms=gate.NORM)


def answered(log, capsys):
    """Run the command with which the last screen asks the model, and return whether it has an image."""
    (line,) = (line for line in read_logs(log)[0].splitlines() if line.startswith("talk to it"))
    words = shlex.split(line)
    words = words[next(at for at, word in enumerate(words) if "generate" in word) + 1 :]
    assert run_command("generate", [*words, "--max-new-tokens", "2"]) == 0, capsys.readouterr().err
    return "--image" in words


@pytest.mark.parametrize("mistake", tiered(["blind", "learn_prompts", "clip"], {"blind"}))
def test_a_wrong_reference_is_noticed(models, data, mistake):
    right, weights = seeing.plain_train(models("gemma3"), data["all"], SETTINGS)
    wrong = SETTINGS if mistake == "blind" else replace(SETTINGS, **{mistake: 10.0 if mistake == "clip" else True})
    records, others = seeing.plain_train(models("gemma3"), data["all"], wrong, blind=mistake == "blind")
    loss_differs = abs(records[-1]["loss"] / right[-1]["loss"] - 1) > 100 * gate.LOSS
    assert loss_differs or max(plain.worst(others[name], weights[name]) for name in weights) > 100


def test_without_the_black_picture_ranks_fall_out_of_step(ranks, tmp_path, models, data):
    """ZeRO-3 over gloo: one rank gathers the tower's weights while the other gathers a layer's."""
    run = RunFolder(tmp_path / "run")
    write_recipe(run, seeing.recipe_for(models("gemma3"), data["one"], "zero3.json", SETTINGS, micro_batch_size=4))
    statuses = ranks.run(mistakes.blind_ranks, str(run.path), log=tmp_path / "log")
    assert any(statuses) and not run.export.exists()
    assert any("gloo::EnforceNotMet" in log for log in read_logs(tmp_path / "log"))


@pytest.mark.parametrize(
    ("deepspeed", "train_vision"), tiered([("zero2.json", False), ("zero3.json", True)], {("zero2.json", False)})
)
def test_adapters_are_on_the_language_part(ranks, tmp_path, capsys, models, data, deepspeed, train_vision):
    lora = Lora(rank=4, alpha=8)
    recipe = seeing.recipe_for(models("gemma3"), data["one"], deepspeed, SETTINGS, lora=lora, train_vision=train_vision)
    run = run_on(ranks, recipe, tmp_path)
    names = load_file(run.export / "adapter_model.safetensors")
    assert any(".language_model.layers." in name for name in names)
    assert any("vision_tower" in name for name in names) == train_vision
    assert (run.export / "processor_config.json").exists()
    assert answered(tmp_path / "log", capsys)
    card = (run.export / "README.md").read_text(encoding="utf-8")
    assert "AutoModelForImageTextToText" in card and "pipeline_tag: image-text-to-text" in card


@pytest.mark.every
def test_in_4_bits_the_tower_stays_whole(ranks, tmp_path, models, data):
    recipe = seeing.recipe_for(models("gemma3"), data["one"], "zero2.json", SETTINGS, lora=Lora(rank=4, alpha=8))
    recipe = replace(recipe, precision="bf16", model=replace(recipe.model, quantization="nf4"))
    run = run_on(ranks, recipe, tmp_path)
    base = export.load_base(models("gemma3"), run.export)
    quantized = [name for name, weight in base.named_parameters() if type(weight).__name__ == "Params4bit"]
    assert quantized and all(".language_model.layers." in name for name in quantized)
    losses = [row["loss"] for row in read_jsonl(run.metrics)]
    assert losses[-1] < losses[0]
