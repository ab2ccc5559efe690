"""A finished run that goes on: with more steps or epochs, or after it stopped early."""

import math
from dataclasses import replace

import pytest

from deepspeed_recipes.commands import launch
from deepspeed_recipes.launching import restarts
from deepspeed_recipes.launching.paths import locate
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.recipe import Schedule
from deepspeed_recipes.recipe.run_folder import (
    COMPLETE,
    RunFolder,
    newest_checkpoint,
    read_json,
    read_jsonl,
    write_json,
    write_recipe,
)
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training.optimizer import rate_schedule
from tests.ranks import read_logs
from tests.small import small


@pytest.fixture
def asked(tmp_path):
    """Return a function that resumes a finished run of ten steps with some settings."""

    def ask(*words, stopped_early=None, **changes):
        run = RunFolder(tmp_path / "run")
        recipe = pages.find("tiny", "full")
        write_json(
            run.checkpoints / "checkpoint-10" / COMPLETE, {"step": 10, "world_size": 2, "layout": {}, "files": {}}
        )
        write_recipe(run, locate(replace(recipe, **changes)))
        summary = {"stopped": False, "steps": 10} | ({"stopped_early": stopped_early} if stopped_early else {})
        write_json(run.summary, summary)
        write_json(run.deepspeed, {"zero_optimization": {"stage": 3}})
        return launch.main(
            ["tiny", "full", "--resume", "--output-dir", str(run.path), "--gpus", "2", "--dry-run", *words]
        )

    return ask


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        (["max_steps=20"], {"max_steps": 10}),
        (["max_steps=20"], {"epochs": 1.0, "max_steps": None}),
        (["epochs=3"], {"epochs": 1.0, "max_steps": None}),
        (["max_steps=none", "epochs=3"], {"max_steps": 10}),
        (["early_stopping=none"], {"max_steps": 40, "early_stopping": 2}),
        (["early_stopping=6"], {"max_steps": 40, "early_stopping": 2}),
    ],
)
def test_a_longer_run_goes_on(asked, capsys, words, changes):
    early = "after step 10 of 40: no better loss" if "early_stopping" in changes else None
    assert asked(*words, stopped_early=early, **changes) == 0
    assert f"resuming with changed settings: {words[-1]}" in capsys.readouterr().out.replace(
        "max_steps=none ", ""
    ).replace(".0", "")


@pytest.mark.parametrize(
    ("words", "changes", "message"),
    [
        ([], {"max_steps": 10}, "has finished its 10 steps; max_steps=20 goes on"),
        (["max_steps=10"], {"max_steps": 10}, "has finished its 10 steps; max_steps=20 goes on"),
        (["max_steps=5"], {"max_steps": 10}, "has finished its 10 steps"),
        ([], {"max_steps": None, "epochs": 2.0}, "has finished its 10 steps; epochs=3 goes on"),
        (["epochs=1"], {"max_steps": None, "epochs": 2.0}, "has finished its 10 steps; epochs=3 goes on"),
        (["epochs=3"], {"max_steps": 10}, "epochs=3: ignored, since the run has max_steps=10; .* max_steps=none"),
        (["max_steps=80"], {"max_steps": 40, "early_stopping": 2}, "stopped early .*early_stopping=4 or .*=none"),
    ],
)
def test_a_run_that_is_not_longer_is_refused(asked, words, changes, message):
    early = "after step 10 of 40: no better loss" if "early_stopping" in changes else None
    with pytest.raises(UserError, match=message):
        asked(*words, stopped_early=early, **changes)


def test_the_schedule_follows_the_new_length(ranks, tmp_path, model_folder, conversations):
    recipe = small(model_folder, conversations, "zero2.json", max_steps=4, save_steps=100)
    recipe = replace(recipe, schedule=Schedule("cosine", 0))
    run = RunFolder(tmp_path / "run")
    write_recipe(run, recipe)
    ranks.check(training_run.main, str(run.path), log=tmp_path / "log")
    assert read_json(run.summary)["steps"] == 4
    longer = replace(recipe, max_steps=8)
    restarts.prepare(longer, run, 2, newest_checkpoint(run))
    write_recipe(run, longer)
    ranks.check(training_run.main, str(run.path), log=tmp_path / "resumed")
    rates = [row["learning_rate"] for row in read_jsonl(run.metrics)]
    of_four, of_eight = (rate_schedule(recipe, steps) for steps in (4, 8))
    expected = [recipe.learning_rate * of_four(step) for step in range(4)]
    expected += [recipe.learning_rate * of_eight(step) for step in range(4, 8)]
    assert rates == pytest.approx(expected) and read_json(run.summary)["steps"] == 8
    assert math.isclose(of_eight(4), 0.5)
    screen = read_logs(tmp_path / "resumed")[0]
    assert "the run had 4 steps: from here on the learning rate follows the cosine schedule of 8" in screen


def test_ctrl_c_is_no_success_for_a_shell(tmp_path):
    run, recipe = RunFolder(tmp_path), pages.find("tiny", "full")
    write_json(run.summary, {"stopped": True, "steps": 3})
    for interrupted, status in ((True, 130), (False, 0)):
        outcome = restarts.Outcome(0, None, True, interrupted)
        assert restarts.run_with_restarts(recipe, run, 2, 0, lambda _, ended=outcome: ended, lambda: 2) == status
    write_json(run.summary, {"stopped": False, "steps": 9})
    finished = restarts.Outcome(0, None, True, True)
    assert restarts.run_with_restarts(recipe, run, 2, 0, lambda _: finished, lambda: 2) == 0, "it came too late"
