"""Hybrid shards (ZeRO-3 with hpZ) train exactly the model that plain PyTorch trains in one process.

Four ranks in two groups of two: states are sharded over all four, and each group keeps parameters for itself too.
"""

import pytest

from recipes.spec.pages import ROOT
from recipes.spec.run_folder import RunFolder, write_recipe
from recipes.training import run as training_run
from tests.parity import gate, plain

SETTINGS = plain.Settings()


@pytest.fixture(scope="module")
def reference(model_folder, conversations):
    return plain.train(model_folder, conversations, SETTINGS)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_same_model_as_plain_pytorch(ranks, tmp_path, model_folder, conversations, reference, accumulation):
    run = RunFolder(tmp_path / "run")
    config = str(ROOT / "configs" / "zero3_hpz.json")
    size = 8 // 4 // accumulation
    recipe = gate.lesson(SETTINGS, model_folder, conversations, config, micro_batch_size=size)
    write_recipe(run, recipe)
    ranks.check(training_run.main, str(run.path), world_size=4, log=tmp_path / "log")
    gate.agree(run, *reference)
