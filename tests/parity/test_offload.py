"""States on the CPU or on a drive: the model that plain PyTorch trains in one process."""

import pytest

from recipes.spec.pages import ROOT
from recipes.spec.run_folder import RunFolder, read_json, write_json, write_recipe
from recipes.training import run as training_run
from tests.parity import gate, plain

SETTINGS = plain.Settings()


@pytest.fixture(scope="module")
def reference(model_folder, conversations):
    return plain.train(model_folder, conversations, SETTINGS)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("config", ["zero2_offload", "zero3_offload", "zero3_offload_params", "zero3_nvme"])
def test_same_model_as_plain_pytorch(ranks, tmp_path, model_folder, conversations, reference, config, accumulation):
    values = read_json(ROOT / "configs" / f"{config}.json")
    for block in ("offload_optimizer", "offload_param"):
        if values["zero_optimization"].get(block, {}).get("device") == "nvme":
            values["zero_optimization"][block]["nvme_path"] = str(tmp_path)
    write_json(tmp_path / "config.json", values)
    run = RunFolder(tmp_path / "run")
    size = 8 // 2 // accumulation
    path = str(tmp_path / "config.json")
    recipe = gate.lesson(SETTINGS, model_folder, conversations, path, micro_batch_size=size)
    write_recipe(run, recipe)
    ranks.check(training_run.main, str(run.path), log=tmp_path / "log")
    gate.agree(run, *reference)
