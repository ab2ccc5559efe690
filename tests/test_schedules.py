"""The learning rate over a run: transformers' schedules, with the settings that each has."""

from dataclasses import replace

import pytest
import torch
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType

from deepspeed_recipes.recipe import overrides, pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.recipe import Layout, Schedule
from deepspeed_recipes.recipe.run_folder import RunFolder, read_jsonl, write_recipe
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training.optimizer import rate_schedule
from tests.small import small
from tests.tiers import tiered

RATE, STEPS = 1e-3, 8
CASES = {
    "constant": (Schedule("constant", 0), {}),
    "constant_with_warmup": (Schedule("constant_with_warmup", 2), {}),
    "linear": (Schedule("linear", 0.2), {}),
    "cosine": (Schedule("cosine", 0), {}),
    "cosine_with_restarts": (Schedule("cosine_with_restarts", 2, cycles=2), {"num_cycles": 2}),
    "cosine_with_min_lr": (Schedule("cosine_with_min_lr", 2, min_rate=0.1), {"min_lr_rate": 0.1}),
    "cosine_warmup_with_min_lr": (Schedule("cosine_warmup_with_min_lr", 2, min_rate=0.2), {"min_lr": 0.2 * RATE}),
    "polynomial": (Schedule("polynomial", 2, min_rate=0.1, power=2.0), {"lr_end": 0.1 * RATE, "power": 2.0}),
    "inverse_sqrt": (Schedule("inverse_sqrt", 2, timescale=3), {"timescale": 3}),
    "warmup_stable_decay": (
        Schedule("warmup_stable_decay", 2, decay=0.4, min_rate=0.1, decay_type="1-sqrt"),
        {"num_decay_steps": 4, "min_lr_ratio": 0.1, "decay_type": "1-sqrt"},
    ),
}


def theirs(name):
    """Return the rates of the updates by transformers; a warm-up begins with its second rate, one step longer."""
    schedule, options = CASES[name]
    first = 1 if schedule.warmup and name != "cosine_warmup_with_min_lr" else 0
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=RATE)
    warmup = schedule.warmup if schedule.warmup >= 1 else 2  # a share of 0.2 of nine steps
    scheduler = get_scheduler(name, optimizer, int(warmup) if schedule.warmup else 0, STEPS + first, options)
    rates = []
    for _ in range(STEPS + first):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates[first:]


@pytest.mark.parametrize("name", CASES)
def test_every_schedule_is_that_of_transformers(name):
    recipe = overrides.apply(pages.find("tiny", "full"), [f"learning_rate={RATE}"])
    shape = rate_schedule(replace(recipe, schedule=CASES[name][0]), STEPS)
    assert [RATE * shape(step) for step in range(STEPS)] == pytest.approx(theirs(name))
    assert len(set(theirs(name))) > 1 or name == "constant"


@pytest.mark.parametrize(
    ("name", "layout"),
    tiered(
        [(name, layout) for name in CASES for layout in ("data", "pipeline")],
        {("warmup_stable_decay", "pipeline"), ("polynomial", "data")},
    ),
)
def test_an_engine_updates_at_these_rates(ranks, tmp_path, model_folder, conversations, name, layout):
    config, sizes = ("zero2.json", Layout()) if layout == "data" else ("pipeline.json", Layout(pipeline=2))
    recipe = small(
        model_folder,
        conversations,
        config,
        layout=sizes,
        learning_rate=RATE,
        max_steps=STEPS,
        schedule=CASES[name][0],
        layer_decay=0.5 if layout == "data" else 1.0,  # several groups, each with a share of the rate
    )
    run = RunFolder(tmp_path / "run")
    write_recipe(run, recipe)
    ranks.check(training_run.main, str(run.path), log=tmp_path / "log")
    assert [row["learning_rate"] for row in read_jsonl(run.metrics)] == pytest.approx(theirs(name))


def test_a_warm_up_longer_than_the_run_has_a_rate_everywhere():
    for name, (schedule, _) in CASES.items():
        shape = rate_schedule(replace(pages.find("tiny", "full"), schedule=Schedule(name, 50)), 4)
        rates = [shape(step) for step in range(5)]
        assert all(0 < rate <= 1 for rate in rates[:4]), (name, rates, schedule)


def test_every_name_of_transformers_is_taken_or_refused_with_a_reason():
    page = pages.find("tiny", "full")
    for kind in (one.value for one in SchedulerType):
        if kind in CASES:
            assert overrides.apply(page, [f"schedule.kind={kind}"]).schedule.kind == kind
        else:
            with pytest.raises(UserError, match=f"schedule.kind={kind}: DeepSpeed's engine advances the schedule"):
                overrides.apply(page, [f"schedule.kind={kind}"])
    assert overrides.apply(page, ["schedule.kind=wsd"]).schedule.kind == "warmup_stable_decay"


@pytest.mark.parametrize(
    ("setting", "fix"),
    [
        ("min_rate=0.1", "cosine_with_min_lr"),
        ("cycles=2", "cosine_with_restarts"),
        ("power=2", "polynomial"),
        ("decay=0.2", "warmup_stable_decay"),
        ("decay_type=linear", "warmup_stable_decay"),
        ("timescale=5", "inverse_sqrt"),
    ],
)
def test_a_setting_of_another_schedule_is_refused(setting, fix):
    page = pages.find("tiny", "full")
    for kind in ("cosine", "linear"):
        with pytest.raises(UserError, match=f"with schedule.kind={kind}: .*; use schedule.kind={fix}"):
            overrides.apply(page, [f"schedule.{setting}", f"schedule.kind={kind}"])
    assert overrides.apply(page, [f"schedule.{setting}", f"schedule.kind={fix}"]).schedule.kind == fix
