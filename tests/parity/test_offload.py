"""States on the CPU or on a drive: the model that plain PyTorch trains in one process."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from deepspeed_recipes.recipe.run_folder import RunFolder, read_json, write_json
from deepspeed_recipes.training import run as training_run
from tests import ROOT
from tests.parity import gate, plain
from tests.ranks import run_on
from tests.test_configs_run import LIBAIO
from tests.tiers import tiered
from tests.workers import mistakes

SETTINGS = plain.Settings()
WIDE = plain.Settings(learning_rate=2e-4)
NORMS = 1e-4
"""Of the wide model: plain PyTorch in fp32 is 6e-5 from itself in fp64."""


@pytest.fixture
def train(ranks, tmp_path):
    """Return a function that trains a model with a file of configs/ on two ranks, its drive in `tmp_path`."""

    def run(settings, model, data, name, accumulation=1, function=training_run.main) -> RunFolder:
        config = read_json(ROOT / "configs" / f"{name}.json")
        for block in ("offload_optimizer", "offload_param"):
            if config["zero_optimization"].get(block, {}).get("device") == "nvme":
                config["zero_optimization"][block]["nvme_path"] = str(tmp_path / "drive")
        path = tmp_path / f"{name}.json"
        write_json(path, config)
        recipe = gate.recipe_for(settings, model, data, str(path), micro_batch_size=8 // 2 // accumulation)
        return run_on(ranks, recipe, tmp_path, function=function)

    return run


@pytest.fixture(scope="module")
def reference(model_folder, conversations):
    return plain.train(model_folder, conversations, SETTINGS)


@pytest.mark.parametrize(
    ("config", "accumulation"),
    tiered(
        [(name, steps) for name in ("zero2_offload", "zero3_offload", "zero3_offload_params") for steps in (1, 2)],
        {("zero3_offload", 2)},
    ),
)
def test_same_model_as_plain_pytorch(train, model_folder, conversations, reference, config, accumulation):
    gate.agree(train(SETTINGS, model_folder, conversations, config, accumulation), *reference)


def test_a_longer_step_on_the_cpu_is_noticed(train, model_folder, conversations, reference):
    run = train(SETTINGS, model_folder, conversations, "zero2_offload", function=mistakes.long_adam_steps)
    with pytest.raises(AssertionError):
        gate.agree(run, *reference)


@pytest.fixture(scope="module")
def wide(model_folder, tmp_path_factory) -> Path:
    """Make a model wide enough for a drive: DeepSpeed keeps shards below 1 MiB in memory."""
    folder = tmp_path_factory.mktemp("wide")
    shutil.copytree(model_folder, folder, dirs_exist_ok=True)
    torch.manual_seed(0)
    changes = {"hidden_size": 512, "intermediate_size": 1024, "initializer_range": 0.05}
    config = AutoConfig.from_pretrained(model_folder, **changes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def wide_reference(wide, conversations):
    return plain.train(wide, conversations, WIDE)


@pytest.mark.every
@pytest.mark.skipif(not LIBAIO, reason="libaio's headers are not installed")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_same_model_from_a_drive(train, tmp_path, wide, conversations, wide_reference, accumulation):
    gate.agree(train(WIDE, wide, conversations, "zero3_nvme", accumulation), *wide_reference, norms=NORMS)
    written = {file.relative_to(tmp_path / "drive").parts[1] for file in (tmp_path / "drive").rglob("*.swp")}
    assert written == {"optimizer", "float32params"}


@pytest.mark.every
@pytest.mark.skipif(not LIBAIO, reason="libaio's headers are not installed")
def test_a_longer_step_from_a_drive_is_noticed(train, wide, conversations, wide_reference):
    run = train(WIDE, wide, conversations, "zero3_nvme", function=mistakes.long_adam_steps)
    with pytest.raises(AssertionError):
        gate.agree(run, *wide_reference, norms=NORMS)


@pytest.mark.every
def test_the_wide_reference_is_exact_enough(wide, conversations, wide_reference):
    records, weights = plain.train(wide, conversations, WIDE, torch.float64)
    for single, double in zip(wide_reference[0], records, strict=True):
        assert single["loss"] == pytest.approx(double["loss"], rel=gate.LOSS)
        assert single["grad_norm"] == pytest.approx(double["grad_norm"], rel=NORMS)
    assert max(plain.worst(weight.double(), weights[name]) for name, weight in wide_reference[1].items()) < 0.1
