"""Hybrid shards (ZeRO-3 with hpZ) train exactly the model that plain PyTorch trains in one process.

Four ranks in two groups of two: everything is sharded over all four, and each group keeps parameters for itself too.
"""

from dataclasses import replace

import pytest

from deepspeed_recipes.recipe.recipe import Lora, Recipe
from deepspeed_recipes.recipe.run_folder import RunFolder, read_json, read_jsonl, write_recipe
from deepspeed_recipes.training import run as training_run
from tests import ROOT
from tests.parity import gate, plain
from tests.workers import mistakes

SETTINGS = plain.Settings()


@pytest.fixture(scope="module")
def reference(model_folder, conversations):
    return plain.train(model_folder, conversations, SETTINGS)


@pytest.fixture
def recipe(model_folder, conversations) -> Recipe:
    config = str(ROOT / "configs" / "zero3_hpz.json")
    return gate.recipe_for(SETTINGS, model_folder, conversations, config, micro_batch_size=1)


@pytest.fixture
def train(ranks, tmp_path):
    """Return a function that runs a recipe on four ranks."""

    def run(recipe: Recipe, name: str = "run", function=training_run.main) -> RunFolder:
        folder = RunFolder(tmp_path / name)
        write_recipe(folder, recipe)
        ranks.check(function, str(folder.path), world_size=4, log=tmp_path / f"{name}.log")
        return folder

    return run


@pytest.mark.every
@pytest.mark.parametrize("size", (1, 2))
def test_same_model_as_plain_pytorch(train, recipe, reference, size):
    run = train(replace(recipe, micro_batch_size=size))
    gate.agree(run, *reference)
    engine = read_json(run.deepspeed)
    assert engine["zero_optimization"]["zero_hpz_partition_size"] == 2
    assert engine["gradient_accumulation_steps"] == 2 // size


@pytest.mark.every
def test_a_stale_copy_is_noticed(train, recipe, reference):
    with pytest.raises(AssertionError):  # by the run itself, where a loss is not finite
        gate.agree(train(recipe, function=mistakes.stale_copies), *reference)


@pytest.mark.every
def test_adapters_train_as_under_zero3(train, recipe):
    """The frozen weights have second copies too."""
    recipe = replace(recipe, lora=Lora(rank=4, alpha=8))
    hybrid = read_jsonl(train(recipe).metrics)
    sharded = replace(recipe, deepspeed=str(ROOT / "configs" / "zero3.json"))
    expected = read_jsonl(train(sharded, "zero3").metrics)
    assert expected[-1]["loss"] < 0.9 * expected[0]["loss"]
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in hybrid] == pytest.approx([row[key] for row in expected], rel=gate.LOSS)
