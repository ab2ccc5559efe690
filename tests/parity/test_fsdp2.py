"""FSDP2, by configs/accelerate/fsdp2.yaml in a project of the user's own, trains the model that ZeRO-3 does.

Both are compared with the same plain PyTorch: ZeRO in test_zero.py.
"""

import json
from dataclasses import replace

import pytest
import torch

from tests.launching import ROOT, WORKERS, accelerate_launch, run
from tests.parity import gate, plain

SETTINGS = plain.Settings()

pytestmark = pytest.mark.every


@pytest.fixture(scope="module")
def accelerate(tmp_path_factory, model_folder, conversations):
    """Train with the file on two ranks; return what was sharded, the losses, and the final weights."""
    folder = tmp_path_factory.mktemp("fsdp2")
    script = [str(WORKERS / "fsdp2.py"), str(folder), str(model_folder), str(conversations)]
    command = accelerate_launch("fsdp2.yaml", "--mixed_precision", "no", *script)
    run(["env", f"PYTHONPATH={ROOT}", *command], folder)
    return json.loads((folder / "found.json").read_text()), torch.load(folder / "weights.pt")


def test_it_trains_the_same_model_as_plain_pytorch(accelerate, model_folder, conversations):
    found, weights = accelerate
    assert all(found["sharded"]) and "FSDP" in found["kind"], "not DDP, which accelerate makes of it on CPUs"
    records, expected = plain.train(model_folder, conversations, SETTINGS)
    check(found["losses"], records)
    gate.near(weights, expected)


def test_a_wrong_weighting_is_noticed(accelerate, model_folder, conversations):
    records, _ = plain.train(model_folder, conversations, replace(SETTINGS, mean_of_means=True, steps=2))
    with pytest.raises(AssertionError):
        check(accelerate[0]["losses"][:2], records)


def check(losses, records):
    for ours, theirs in zip(losses, records, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=gate.LOSS)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=gate.NORM)
