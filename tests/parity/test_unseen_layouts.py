"""Architectures that no page has, in every layout: what plain PyTorch trains in one process, or refused with why."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from recipes.proof.ranks import read_logs
from recipes.spec.recipe import Draft, Layout
from recipes.spec.run_folder import RunFolder, write_recipe
from recipes.training import run as training_run
from recipes.training.model import draft
from tests.parity import gate, plain
from tests.tiers import tiered

SETTINGS = plain.Settings()
KINDS = ("arcee", "dots1", "granitemoe", "jetmoe", "olmo", "persimmon", "stablelm", "starcoder2")
LAYOUTS = {
    "zero3": ("zero3.json", Layout()),
    "pipeline": ("zero1.json", Layout(pipeline=2)),
    "sequence": ("zero3.json", Layout(sequence=2)),
    "tensor": ("zero1.json", Layout(tensor=2)),
}
REFUSED: dict[tuple[str, str], str] = {}
"""By architecture and layout: what the run says instead of training."""
CASES = [(kind, name) for kind in KINDS for name in LAYOUTS]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a function that makes a small random model of a kind, whose wrong gradients show."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind) / "model"
            tokenizer = AutoTokenizer.from_pretrained(draft.TINY_MODEL)
            config = draft.shrink(AutoConfig.for_model(kind), Draft(layers=4), tokenizer)
            for name, value in config.to_dict().items():
                if "drop" in name and isinstance(value, float):
                    setattr(config, name, 0.0)
            config.initializer_range = 0.2
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(made[kind])
            tokenizer.save_pretrained(made[kind])
        return made[kind]

    return make


@pytest.fixture(scope="module")
def references(models, conversations):
    trained = {}

    def reference(kind: str):
        if kind not in trained:
            trained[kind] = plain.train(models(kind), conversations, SETTINGS)
        return trained[kind]

    return reference


@pytest.mark.parametrize(("kind", "name"), tiered(CASES, {("stablelm", "pipeline"), ("granitemoe", "zero3")}))
def test_same_model_as_plain_pytorch_or_refused(ranks, tmp_path, models, references, conversations, kind, name):
    run = RunFolder(tmp_path / "run")
    config, layout = LAYOUTS[name]
    write_recipe(run, gate.recipe_for(SETTINGS, models(kind), conversations, config, layout=layout, micro_batch_size=2))
    if (kind, name) in REFUSED:
        assert set(ranks.run(training_run.main, str(run.path), log=tmp_path / "log")) == {2}
        assert any(REFUSED[kind, name] in log for log in read_logs(tmp_path / "log"))
        return
    ranks.check(training_run.main, str(run.path), log=tmp_path / "log")
    gate.agree(run, *references(kind))
