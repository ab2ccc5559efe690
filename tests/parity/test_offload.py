"""States on the CPU or on a drive: the model that plain PyTorch trains in one process."""

import pytest

from recipes.spec.pages import ROOT
from recipes.spec.run_folder import RunFolder, read_json, write_json, write_recipe
from recipes.training import run as training_run
from tests.parity import gate, plain
from tests.workers import hasty_adam

SETTINGS = plain.Settings()


@pytest.fixture(scope="module")
def reference(model_folder, conversations):
    return plain.train(model_folder, conversations, SETTINGS)


@pytest.fixture
def train(ranks, tmp_path, model_folder, conversations):
    """Return a function that runs the recipe with a file of configs/ on two ranks."""

    def run(name: str, accumulation: int, function=training_run.main) -> RunFolder:
        config = read_json(ROOT / "configs" / f"{name}.json")
        for block in ("offload_optimizer", "offload_param"):
            if config["zero_optimization"].get(block, {}).get("device") == "nvme":
                config["zero_optimization"][block]["nvme_path"] = str(tmp_path / "drive")
        write_json(tmp_path / "config.json", config)
        folder = RunFolder(tmp_path / "run")
        size = 8 // 2 // accumulation
        path = str(tmp_path / "config.json")
        write_recipe(folder, gate.lesson(SETTINGS, model_folder, conversations, path, micro_batch_size=size))
        ranks.check(function, str(folder.path), log=tmp_path / "log")
        return folder

    return run


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("config", ["zero2_offload", "zero3_offload", "zero3_offload_params", "zero3_nvme"])
def test_same_model_as_plain_pytorch(train, tmp_path, reference, config, accumulation):
    gate.agree(train(config, accumulation), *reference)
    assert bool(list((tmp_path / "drive").rglob("*.swp"))) == (config == "zero3_nvme")


@pytest.mark.parametrize("config", ["zero2_offload", "zero3_nvme"])
def test_a_longer_step_on_the_cpu_is_noticed(train, reference, config):
    run = train(config, 1, hasty_adam.main)
    with pytest.raises(AssertionError):
        gate.agree(run, *reference)
