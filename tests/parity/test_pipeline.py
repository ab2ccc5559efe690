"""Pipelines train exactly the model that plain PyTorch trains in one process."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from recipes.spec import pages
from recipes.spec.recipe import Draft, Layout
from recipes.spec.run_folder import RunFolder, write_recipe
from recipes.training import draft
from recipes.training import run as training_run
from tests.parity import gate, plain

SETTINGS = plain.Settings()


@dataclass(frozen=True)
class Case:
    """One way to split a model."""

    layout: Layout
    world_size: int
    stage: int = 1
    micro_batch: int = 1
    checkpointing: bool = False
    family: str = "llama3-8b"

    def __str__(self) -> str:
        sizes = "x".join(str(size) for size in (self.layout.pipeline, self.layout.tensor, self.layout.sequence))
        return f"{self.family}-{sizes}-of-{self.world_size}-zero{self.stage}"


CASES = [
    Case(Layout(pipeline=2), 2, stage=0, micro_batch=2),
    Case(Layout(pipeline=2), 2, checkpointing=True, family="gemma3-1b"),
    Case(Layout(pipeline=4), 4, stage=0, micro_batch=2, family="qwen3-0.6b"),
    Case(Layout(pipeline=2), 4, checkpointing=True),
    Case(Layout(pipeline=2, tensor=2), 4, stage=0, family="qwen3-0.6b"),
    Case(Layout(pipeline=2, tensor=2), 4, micro_batch=2, checkpointing=True),
]
MORE = [
    Case(Layout(pipeline=4), 8, family="gemma3-1b"),
    Case(Layout(pipeline=2, tensor=2), 8, checkpointing=True, family="qwen3-0.6b"),
    Case(Layout(pipeline=3), 3, stage=0, family="qwen3_moe-30b-a3b"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a function that makes a small random model of a family, whose wrong gradients show."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family) / "model"
            tokenizer = AutoTokenizer.from_pretrained(draft.TINY_MODEL)
            whole = AutoConfig.for_model(**pages.find(family, "full").model.config)
            config = draft.shrink(whole, Draft(layers=4), tokenizer)
            config.initializer_range = 0.2
            config.num_key_value_heads = min(2, config.num_key_value_heads * 2)
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(made[family])
            tokenizer.save_pretrained(made[family])
        return made[family]

    return make


@pytest.fixture(scope="module")
def references(models, conversations):
    trained = {}

    def reference(family: str):
        if family not in trained:
            trained[family] = plain.train(models(family), conversations, SETTINGS)
        return trained[family]

    return reference


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.every) for case in MORE)], ids=str)
def test_same_model_as_plain_pytorch(ranks, tmp_path, models, conversations, references, case):
    run = RunFolder(tmp_path / "run")
    recipe = gate.lesson(
        SETTINGS,
        models(case.family),
        conversations,
        f"zero{case.stage}.json",
        layout=case.layout,
        micro_batch_size=case.micro_batch,
        gradient_checkpointing=case.checkpointing,
    )
    write_recipe(run, recipe)
    ranks.check(training_run.main, str(run.path), log=tmp_path / "log", world_size=case.world_size)
    gate.agree(run, *references(case.family))
