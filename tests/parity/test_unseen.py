"""Architectures that neither a page nor another test names: plain PyTorch's model in every layout, or a reason."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from deepspeed_recipes.prove import techniques
from deepspeed_recipes.recipe.recipe import Draft, Layout
from deepspeed_recipes.recipe.run_folder import RunFolder, write_recipe
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training.model import draft
from tests.parity import gate, plain
from tests.ranks import read_logs

SETTINGS = plain.Settings(steps=4, learning_rate=1e-3)
"""At higher rates rounding grows to other choices of experts within six steps."""
KINDS: dict[str, dict[str, float]] = {
    "arcee": {},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "granitemoe": {"attention_multiplier": 0.25},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "nemotron": {"num_key_value_heads": 8},
    "persimmon": {},
    "stablelm": {},
    "starcoder2": {},
}
"""Model types, and what transformers' defaults for them leave out, or set as no real model does."""
LAYOUTS = {
    "zero3": ("zero3.json", Layout()),
    "pipeline": ("zero1.json", Layout(pipeline=2)),
    "sequence": ("zero1.json", Layout(sequence=2)),
    "tensor": ("zero1.json", Layout(tensor=2)),
}
REFUSED = {("jamba", "sequence"): r"layout\.sequence=2: jamba .* trains differently over several ranks"}
"""What cannot be done, and what is said about it."""

pytestmark = pytest.mark.every


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(kind, tmp_path_factory) -> Path:
    """Make a small random model of the kind, whose wrong gradients show."""
    tokenizer = AutoTokenizer.from_pretrained(draft.TINY_MODEL)
    config = draft.shrink(AutoConfig.for_model(kind, **KINDS[kind]), Draft(layers=4), tokenizer)
    config.initializer_range = 0.2
    return techniques.random_model(tmp_path_factory.mktemp(kind), config)


@pytest.fixture(scope="module")
def reference(model, conversations):
    return plain.train(model, conversations, SETTINGS)


def written(folder, model, conversations, layout) -> RunFolder:
    """Write the run of a layout."""
    run = RunFolder(folder / "run")
    file, split = LAYOUTS[layout]
    write_recipe(run, gate.recipe_for(SETTINGS, model, conversations, file, layout=split, micro_batch_size=2))
    return run


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_to_a_plain_loop_or_refused_with_the_reason(
    ranks, tmp_path, kind, model, conversations, reference, layout
):
    run = written(tmp_path, model, conversations, layout)
    if (kind, layout) in REFUSED:
        assert all(ranks.run(training_run.main, str(run.path), log=tmp_path / "log"))
        said = "\n".join(read_logs(tmp_path / "log"))
        assert re.search(REFUSED[kind, layout], said) and not run.export.exists(), said
        return
    ranks.check(training_run.main, str(run.path), log=tmp_path / "log")
    gate.agree(run, *reference)


@pytest.mark.parametrize("kind", ["stablelm"], indirect=True)
def test_another_loss_is_noticed(ranks, tmp_path, kind, model, conversations, reference):
    run = written(tmp_path, model, conversations, "pipeline")
    ranks.check(training_run.main, str(run.path), log=tmp_path / "log")
    wrong = plain.train(model, conversations, replace(SETTINGS, mean_of_means=True))
    with pytest.raises(AssertionError):
        gate.agree(run, *wrong)
