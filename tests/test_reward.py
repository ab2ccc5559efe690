"""A reward model, from its random head to its export."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from deepspeed_recipes.commands import export as export_script
from deepspeed_recipes.launching.paths import locate
from deepspeed_recipes.planning.cost.training_setup import training_setup
from deepspeed_recipes.recipe import compatibility, deepspeed_file, limits, pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.recipe import Layout, Lora, Schedule
from deepspeed_recipes.recipe.run_folder import RunFolder, read_json, read_jsonl, write_json, write_recipe
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training.methods.preferences import RunRewardTrainer
from deepspeed_recipes.training.model import heads, load
from deepspeed_recipes.training.model_folder import base_model
from tests.parity import gate
from tests.ranks import run_on
from tests.small import small


def test_the_head_depends_on_the_seed_alone(model_folder):
    recipe = small(model_folder, model_folder, method="reward")
    torch.manual_seed(1)
    first = load.load_model(recipe)
    torch.manual_seed(2)
    again, other = load.load_model(recipe), load.load_model(replace(recipe, seed=7))
    assert first.config.num_labels == 1 and first.score.weight.shape == (1, 64)
    assert torch.equal(first.score.weight, again.score.weight)
    assert not torch.equal(first.score.weight, other.score.weight)


def test_families_without_a_classification_model_are_refused_at_once():
    """`NO_CLASSIFIER` is what transformers says."""
    recipes = [pages.find(f"{family}-{next(iter(pages.page(family).SIZES))}", "full") for family in pages.families()]
    for recipe in recipes:
        if recipe.model.vision:
            continue  # refused for what it sees
        kind = recipe.model.config["model_type"]
        asked = replace(recipe, method="reward", micro_batch_size=1, global_batch_size=8)
        if kind in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
            limits.check(asked, 1, deepspeed_file.DeepSpeedFile(stage=3))
            continue
        with pytest.raises(UserError, match=f"^method=reward: .* does not have for the type {kind}"):
            limits.check(asked, 1, deepspeed_file.DeepSpeedFile(stage=3))
    assert {recipe.model.config["model_type"] for recipe in recipes} > set(compatibility.NO_CLASSIFIER)


def test_a_head_that_is_there_is_kept(model_folder, tmp_path):
    model = load.load_model(small(model_folder, model_folder, method="reward"))
    heads.start(model, 7)
    model.save_pretrained(tmp_path)
    again = load.load_model(small(tmp_path, tmp_path, method="reward"))
    assert torch.equal(again.score.weight, model.score.weight)


def test_the_plan_of_a_reward_model_has_two_sequences_and_no_second_model():
    recipe = locate(pages.find("tiny", "reward"))
    setup = training_setup(recipe, deepspeed_file.read(recipe.deepspeed), 2)
    assert setup.sequences_per_pass == 2 * recipe.micro_batch_size
    assert setup.scores and not setup.reference and not setup.packing


def test_a_folder_says_that_it_holds_a_reward_model(tmp_path, model_folder, refusal):
    assert base_model.head_of(model_folder) == "vocabulary"
    model = load.load_model(small(model_folder, model_folder, method="reward"))
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path)
    assert base_model.head_of(tmp_path) == "scores" and not base_model.labels_of(tmp_path)
    assert "a reward model, which outputs a number" in refusal("generate", tmp_path, "Ada?")
    write_json(tmp_path / "adapter_config.json", {"task_type": "CAUSAL_LM"})
    assert base_model.head_of(tmp_path) == "vocabulary"


def test_a_smaller_micro_batch_weighs_as_many_pairs_as_it_has(monkeypatch):
    """The Trainer takes the mean over micro-batches, of two pairs and of one: of the plain means it would be 2.75."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    trainer = object.__new__(RunRewardTrainer)
    recipe = SimpleNamespace(global_batch_size=3, micro_batch_size=2, layout=Layout())
    trainer.context, trainer.state = SimpleNamespace(recipe=recipe), SimpleNamespace(global_step=0)
    trainer.train_dataset, trainer.filler = range(3), False
    trainer.prepare_step([{"input_ids": torch.zeros(4, 9)}, {"input_ids": torch.zeros(2, 9)}], None)
    parts = [trainer.mean(torch.tensor(losses)) for losses in ([1.0, 2.0], [4.0])]
    assert sum(parts) / 2 == pytest.approx((1 + 2 + 4) / 3)


def test_each_pair_counts_the_same_also_in_the_last_step_of_an_epoch(ranks, tmp_path, model_folder, pairs):
    """Seven pairs in steps of four, of which the last has micro-batches of two and of one."""
    seven = tmp_path / "seven.jsonl"
    seven.write_text("".join(pairs.read_text(encoding="utf-8").splitlines(keepends=True)[:7]), encoding="utf-8")
    losses = {}
    for batch, micro in ((4, 2), (7, 7)):
        run = RunFolder(tmp_path / f"run{batch}")
        recipe = small(model_folder, seven, method="reward", learning_rate=1e-7, max_steps=None, epochs=1.0)
        write_recipe(run, replace(recipe, global_batch_size=batch, micro_batch_size=micro))
        ranks.check(training_run.main, str(run.path), log=tmp_path / f"log{batch}", world_size=1)
        losses[batch] = [row["loss"] for row in read_jsonl(run.metrics)]
    first, last = losses[4]
    assert (4 * first + 3 * last) / 7 == pytest.approx(losses[7][0], abs=1e-4)


def rewards(folder, tokenizer, texts, **options):
    """Return what plain transformers gives each text."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, **options).eval()
    with torch.no_grad():
        return [model(**tokenizer(text, return_tensors="pt")).logits.item() for text in texts]


@pytest.mark.parametrize("lora", [None, pytest.param(Lora(rank=4), marks=pytest.mark.every)], ids=["full", "lora"])
def test_it_ranks_resumes_and_is_loaded_by_transformers(ranks, tmp_path, model_folder, pairs, lora):
    recipe = small(model_folder, pairs, "zero3.json", method="reward", lora=lora, save_steps=3, learning_rate=3e-3)
    recipe = replace(recipe, data=replace(recipe.data, validation=str(pairs)), schedule=Schedule("cosine", 0.1))
    run = run_on(ranks, replace(recipe, global_batch_size=4, micro_batch_size=1), tmp_path)
    summary, records = read_json(run.summary), read_jsonl(run.metrics)
    assert summary["metric"] == "preference_accuracy" and summary["after"] > summary["before"]
    assert all(0 <= row["rewards/accuracies"] <= 1 for row in records)
    screen = (tmp_path / "log.0").read_text()
    assert "LOAD REPORT" not in screen and "talk to it" not in screen and " of reward" in screen.splitlines()[-1]

    folder = run.export
    if lora:
        folder = tmp_path / "merged"
        assert export_script.main([str(run.path), "--output", str(folder), "--merge"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(folder)
    given = rewards(folder, tokenizer, ["Count to 3.", "0 1 2", "2 1 0"])
    assert len(set(given)) == 3

    gate.resume(ranks, run, tmp_path)
    for row, before in zip(read_jsonl(run.metrics), records, strict=True):
        for name in ("loss", "grad_norm", "rewards/margins", "rewards/accuracies"):
            assert row[name] == pytest.approx(before[name], rel=1e-6), (row["step"], name)
    if not lora:
        assert rewards(run.export, tokenizer, ["Count to 3.", "0 1 2", "2 1 0"]) == pytest.approx(given, rel=1e-5)
