"""A run that resumes with other settings of its updates trains as plain PyTorch does with those from there on."""

from dataclasses import replace
from functools import partial

import pytest

from deepspeed_recipes.recipe import deepspeed_file
from deepspeed_recipes.recipe.conversions import from_dict, to_dict
from deepspeed_recipes.recipe.project import CONFIGS
from deepspeed_recipes.recipe.recipe import Layout, Lora
from deepspeed_recipes.recipe.run_folder import (
    newest_checkpoint,
    read_json,
    read_jsonl,
    write_json,
    write_recipe,
)
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training import upstream
from deepspeed_recipes.training.checkpoint import universal
from deepspeed_recipes.training.model import lora as adapters
from tests.parity import gate, plain
from tests.ranks import read_logs, run_on
from tests.tiers import tiered

SETTINGS = plain.Settings(steps=5)
AFTER = {"lr": 2e-3, "betas": (0.9, 0.9), "eps": 3e-5}
CHANGED = {"learning_rate": AFTER["lr"], "weight_decay": 0.7, "adam_beta2": 0.9, "adam_epsilon": AFTER["eps"]}
CASES = {
    **{f"zero{stage}": (f"zero{stage}.json", Layout(), 2) for stage in range(4)},
    "optimizer_block": ("own_optimizer", Layout(), 2),
    "offload": ("zero3_offload.json", Layout(), 2),
    "pipeline": ("pipeline.json", Layout(pipeline=2), 2),
    "tensor": ("zero1.json", Layout(tensor=2), 2),
    # Resumed by one rank: in its universal form.
    "converted_zero1": ("zero1.json", Layout(), 1),
    "converted_zero3": ("zero3.json", Layout(), 1),
}


class Changing:
    """AdamW whose settings change after the third step, up to those that a `mistake` names."""

    def __init__(self, model, settings, kept=()):
        self.optimizer = plain.adamw(model, settings)
        self.steps, self.kept = 0, kept

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        self.optimizer.step()
        self.steps += 1
        if self.steps == 3:
            for group in self.optimizer.param_groups:
                decay = CHANGED["weight_decay"] if group["weight_decay"] else 0.0
                changed = {**AFTER, "weight_decay": decay}
                group.update({key: value for key, value in changed.items() if key not in self.kept})


@pytest.fixture(scope="module")
def reference(model_folder, conversations):
    return plain.train(model_folder, conversations, SETTINGS, optimize=Changing)


def resumed(ranks, folder, model_folder, conversations, case, main=training_run.main):
    config, layout, resumed_by = CASES[case]
    if config == "own_optimizer":  # DeepSpeed makes the optimizer, and decays norms
        block = read_json(CONFIGS / "zenflow.json")["optimizer"]
        config = str(folder / "zero1.json")
        write_json(folder / "zero1.json", read_json(CONFIGS / "zero1.json") | {"optimizer": block})
    recipe = gate.recipe_for(SETTINGS, model_folder, conversations, config, layout=layout, save_steps=3, max_steps=3)
    run = run_on(ranks, recipe, folder)
    write_recipe(run, replace(recipe, max_steps=SETTINGS.steps, save_steps=0, **CHANGED))
    if universal.is_needed(layout, run, resumed_by):
        universal.convert(newest_checkpoint(run))
    ranks.check(main, str(run.path), world_size=resumed_by, log=folder / "resumed")
    return run


@pytest.mark.parametrize("case", tiered(CASES, {"zero1"}))
def test_updates_take_the_settings_of_the_resumed_recipe(ranks, tmp_path, model_folder, conversations, reference, case):
    run = resumed(ranks, tmp_path, model_folder, conversations, case)
    if case != "optimizer_block":
        gate.agree(run, *reference)
    assert [row["learning_rate"] for row in read_jsonl(run.metrics)] == 3 * [SETTINGS.learning_rate] + 2 * [AFTER["lr"]]


def _with_those_of_the_checkpoint(folder: str) -> None:
    upstream.take_update_settings = lambda optimizer, scheduler, asked: None
    training_run.main(folder)


@pytest.mark.every
def test_without_the_workaround_they_stay(ranks, tmp_path, model_folder, conversations):
    run = resumed(ranks, tmp_path, model_folder, conversations, "zero1", _with_those_of_the_checkpoint)
    assert {row["learning_rate"] for row in read_jsonl(run.metrics)} == {SETTINGS.learning_rate}


@pytest.mark.parametrize("kept", [("lr",), ("weight_decay",), ("betas",), ("eps",)])
def test_a_setting_that_stays_is_noticed(model_folder, conversations, reference, kept):
    _, weights = plain.train(model_folder, conversations, SETTINGS, optimize=partial(Changing, kept=kept))
    assert max(plain.worst(weights[name], weight) for name, weight in reference[1].items()) > 10


SAME = {
    "attention": {"model": {"attention": "eager"}},
    "tiled_mlp": {"tiled_mlp": True},
    "tiled_loss": {"tiled_loss": True},
    "checkpointing": {"gradient_checkpointing": True},
    "compile": {"compile": "regional"},
    "liger": {"liger_kernel": True},  # on a GPU
    "micro_batch": {"micro_batch_size": 2},
    "fused": {"lora": {"fused": True}},
}
"""Settings that change how a step is computed, and not what it computes."""


def changed(recipe, settings):
    values = to_dict(recipe)
    for name, value in settings.items():
        values[name] = values[name] | value if isinstance(value, dict) else value
    return from_dict(values)


@pytest.mark.parametrize("name", tiered(SAME, {"attention"}))
def test_what_only_computes_otherwise_is_used_and_changes_nothing(ranks, tmp_path, model_folder, conversations, name):
    settings = plain.Settings(steps=5, learning_rate=2e-4) if "lora" in SAME[name] else SETTINGS
    recipe = gate.recipe_for(settings, model_folder, conversations, "zero1.json", save_steps=3, max_steps=3)
    recipe = replace(recipe, lora=Lora(rank=4, alpha=8) if "lora" in SAME[name] else None)
    run = run_on(ranks, recipe, tmp_path)
    now = changed(replace(recipe, max_steps=settings.steps, save_steps=0), SAME[name])
    assert now != replace(recipe, max_steps=settings.steps, save_steps=0)
    universal.check(now, run, deepspeed_file.read(now.deepspeed), 2)
    write_recipe(run, now)
    if name == "liger":
        statuses = ranks.run(training_run.main, str(run.path), log=tmp_path / "resumed")
        assert 2 in statuses and "liger_kernel=true" in read_logs(tmp_path / "resumed")[0]
        return
    ranks.check(training_run.main, str(run.path), log=tmp_path / "resumed")
    add = (lambda model: adapters.add(model, recipe.lora, recipe.seed)) if recipe.lora else (lambda model: model)
    gate.agree_on_steps(run, plain.train(model_folder, conversations, settings, prepare=add)[0])


@pytest.mark.every
@pytest.mark.parametrize("settings", [{"neftune_alpha": 5.0}, {"lora": {"dropout": 0.5}}], ids=str)
def test_what_adds_noise_is_used_from_there_on(ranks, tmp_path, model_folder, conversations, settings):
    recipe = gate.recipe_for(SETTINGS, model_folder, conversations, "zero1.json", save_steps=3, max_steps=3)
    recipe = replace(recipe, lora=Lora(rank=4, alpha=8) if "lora" in settings else None)
    run = run_on(ranks, recipe, tmp_path)
    write_recipe(run, changed(replace(recipe, max_steps=SETTINGS.steps, save_steps=0), settings))
    ranks.check(training_run.main, str(run.path), log=tmp_path / "resumed")
    add = (lambda model: adapters.add(model, recipe.lora, recipe.seed)) if recipe.lora else (lambda model: model)
    records, _ = plain.train(model_folder, conversations, SETTINGS, prepare=add)
    ours, without = ([row["loss"] for row in rows] for rows in (read_jsonl(run.metrics), records))
    assert ours[:3] == pytest.approx(without[:3], rel=gate.LOSS) and ours[3] != pytest.approx(without[3], rel=1e-3)
