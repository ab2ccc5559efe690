"""Tensor parallelism, alone and with data parallelism, trains exactly the model that plain PyTorch trains."""

from dataclasses import replace

import pytest
from safetensors.torch import load_file

from recipes.spec.recipe import Layout
from recipes.spec.run_folder import RunFolder, read_json, read_jsonl, write_recipe
from recipes.training import run as training_run
from tests.parity import plain
from tests.small import small
from tests.workers import split_layers

SETTINGS = plain.Settings()
RELATIVE = 1e-5


@pytest.fixture(scope="module")
def reference(model_folder, conversations):
    return plain.train(model_folder, conversations, SETTINGS)


def train(ranks, folder, recipe, world_size, main=training_run.main):
    run = RunFolder(folder / "run")
    write_recipe(run, recipe)
    ranks.check(main, str(run.path), world_size=world_size, log=folder / "log")
    return run


def exact(model_folder, conversations, stage, **changes):
    recipe = small(
        model_folder,
        conversations,
        f"zero{stage}.json",
        learning_rate=SETTINGS.learning_rate,
        weight_decay=SETTINGS.weight_decay,
        adam_epsilon=SETTINGS.epsilon,
        max_grad_norm=SETTINGS.clip,
        max_steps=SETTINGS.steps,
        layout=Layout(tensor=2),
        global_batch_size=8,
        micro_batch_size=2,
    )
    return replace(recipe, **changes)


def differences(run, reference) -> dict[str, float]:
    """Return the largest difference of losses, of gradient norms, and of weights as a share of what is allowed."""
    records, weights = reference
    logged = read_jsonl(run.metrics)
    assert [row["step"] for row in logged] == list(range(1, SETTINGS.steps + 1))
    found = {
        key: max(abs(ours[key] / theirs[key] - 1) for ours, theirs in zip(logged, records, strict=True))
        for key in ("loss", "grad_norm")
    }
    exported = load_file(run.export / "model.safetensors")
    assert set(exported) == set(weights) - {"lm_head.weight"}
    found["weights"] = max(plain.worst(weight, weights[name]) for name, weight in exported.items())
    return found


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_same_model_as_plain_pytorch(ranks, tmp_path, model_folder, conversations, reference, stage, world_size):
    recipe = exact(model_folder, conversations, stage, gradient_checkpointing=stage in (1, 3))
    run = train(ranks, tmp_path, recipe, world_size)
    found = differences(run, reference)
    assert found["loss"] < RELATIVE and found["grad_norm"] < RELATIVE and found["weights"] <= 1, found
    engine = read_json(run.deepspeed)
    assert engine["zero_optimization"]["stage"] == stage
    assert engine["tensor_parallel"]["autotp_size"] == 2
    assert engine["gradient_accumulation_steps"] == 8 // 2 // (world_size // 2)


@pytest.mark.parametrize("mistake", ["counted_twice", "parts_of_norms"])
def test_a_mistake_is_noticed(ranks, tmp_path, model_folder, conversations, reference, mistake):
    recipe = exact(model_folder, conversations, 1, max_steps=SETTINGS.steps)
    run = train(ranks, tmp_path, recipe, 4, main=getattr(split_layers, mistake))
    found = differences(run, reference)
    assert max(found["loss"], found["grad_norm"]) > 100 * RELATIVE and found["weights"] > 100, found
