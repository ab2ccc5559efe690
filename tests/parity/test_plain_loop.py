"""recipes/plain_loop.py, the file to copy out, trains the same model too."""

import json
import sys

import pytest
from safetensors.torch import load_file

from recipes import plain_loop
from tests.parity import plain
from tests.ranks import read_logs

SETTINGS = plain.Settings()


def run_plain_loop(*arguments):
    """Run the file as the DeepSpeed launcher would; executed on every rank."""
    sys.argv = ["plain_loop.py", *arguments]
    plain_loop.main()


@pytest.mark.parametrize(("stage", "accumulation"), [(2, 2), (3, 1)])
def test_same_model_as_plain_pytorch(ranks, tmp_path, model_folder, conversations, stage, accumulation):
    options = {
        "--zero-stage": stage,
        "--steps": SETTINGS.steps,
        "--micro-batch": 4 // accumulation,
        "--accumulation": accumulation,
        "--lr": SETTINGS.learning_rate,
        "--adam-epsilon": SETTINGS.epsilon,
        "--weight-decay": SETTINGS.weight_decay,
        "--schedule": "constant",
        "--dtype": "fp32",
        "--log-every": 1,
    }
    flags = [str(part) for pair in options.items() for part in pair]
    output = tmp_path / "model"
    paths = [str(model_folder), str(conversations), str(output)]
    ranks.check(run_plain_loop, *paths, "--no-pack", *flags, log=tmp_path / "log")
    lines = [json.loads(line) for line in read_logs(tmp_path / "log")[0].splitlines() if line.startswith("{")]
    records, weights = plain.train(model_folder, conversations, SETTINGS)
    assert len(lines) == SETTINGS.steps
    for ours, theirs in zip(lines, records, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    for name, weight in load_file(output / "model.safetensors").items():
        assert plain.worst(weight, weights[name]) <= 1, name
