"""How many updates a run makes: counted, said, mended; the first one learns, and a run that learns nothing fails.

The learning rate over a run: transformers' schedules, with the settings that each has.
"""

import contextlib
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainingArguments, get_scheduler
from transformers.trainer_utils import SchedulerType

from deepspeed_recipes.commands import launch
from deepspeed_recipes.recipe import overrides, pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.layout import gradient_accumulation_steps
from deepspeed_recipes.recipe.recipe import Layout, Lora, Schedule
from deepspeed_recipes.recipe.run_folder import RunFolder, read_json, read_jsonl, write_recipe
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training.data import updates
from deepspeed_recipes.training.optimizer import rate_schedule
from deepspeed_recipes.training.trainer import RunTrainer
from tests.ranks import read_logs, run_on
from tests.small import small
from tests.tiers import tiered


def size(documents, sequences):
    return updates.Size(examples=documents, documents=documents, sequences=sequences, tokens=7112)


def test_too_few_updates_are_said_with_what_mends_them():
    recipe = pages.find("llama3-1b", "lora")
    assert updates.advice(recipe, size(60, 1), world_size=1) == (
        "warning: 60 examples in 1 sequence: 1 update per epoch, 1 in all; a global batch is 64 sequences. This "
        "teaches a model little; use packing=false global_batch_size=5, or epochs=12."
    )
    names, numbers = updates.table(recipe, size(60, 1))
    assert re.split(r"\s\s+", names) == [
        "examples",
        "sequences",
        "tokens",
        "steps per epoch",
        "steps in all",
        "warm-up steps",
    ]
    assert numbers.split() == ["60", "1", "7,112", "1", "1", "1"] and len(names) == len(numbers)
    assert updates.advice(recipe, size(5000, 64 * 12), 1) is None
    asked = replace(recipe, max_steps=3)
    assert updates.advice(asked, size(5000, 64), 1) is None, "three steps is what the user asked for"
    said = updates.advice(asked, size(60, 60), 1)
    assert said.endswith("3 in all; a global batch is 64 sequences."), "a smaller batch gives no more updates"


@pytest.mark.parametrize(
    ("documents", "sequences"), [(12, 1), (60, 2), (400, 15), (400, 70), (5000, 200), (90_000, 4000)]
)
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_borrowed_settings_suit_the_amount_of_data(documents, sequences, ranks):
    page = pages.find("llama3-1b", "lora")
    page = replace(page, data=replace(page.data, validation=None, validation_share="auto", metric="loss"))
    found = updates.suited(page, size(documents, sequences), ranks, given={"data.path"})
    steps = updates.in_all(found, sequences if found.packs else documents)
    assert steps >= (30 if documents > 2 * ranks else 10) and found.epochs <= 10
    assert steps // found.logging_steps >= 20 or steps < 20
    assert steps // found.eval_steps >= 9
    assert found.global_batch_size % (found.micro_batch_size * ranks) == 0
    if documents > 10_000:
        assert (found.epochs, found.global_batch_size) == (page.epochs, page.global_batch_size)


def test_borrowed_settings_leave_what_the_user_has_set():
    page = replace(pages.find("llama3-1b", "lora"), global_batch_size=6, epochs=1.0, eval_steps=7, logging_steps=3)
    given = {"global_batch_size", "epochs", "packing", "eval_steps", "logging_steps"}
    assert updates.suited(page, size(400, 15), 2, given) == page
    fixed = replace(page, max_steps=5)
    found = updates.suited(fixed, size(400, 15), 2, {"max_steps"})
    assert (found.max_steps, found.epochs, found.global_batch_size) == (5, 1.0, 6)


@pytest.mark.parametrize(("steps", "between"), [(9, None), (10, 1), (20, 2)])
def test_ten_evaluations_take_at_least_ten_steps(steps, between):
    page = replace(pages.find("llama3-1b", "lora"), max_steps=steps)
    assert updates.suited(page, size(400, 400), 2, {"max_steps"}).eval_steps == between


def test_parts_of_an_epoch_become_steps():
    recipe = replace(pages.find("tiny", "full"), global_batch_size=8, save_steps="epoch", eval_steps="epoch/4")
    found = updates.in_steps(recipe, size(380, 127))
    assert (found.save_steps, found.eval_steps) == (16, 4)  # the last of 16 has seven sequences
    assert updates.in_steps(recipe, size(20, 9)).eval_steps == 1
    numbers = replace(recipe, save_steps=0, eval_steps=None)
    assert updates.in_steps(numbers, None) == numbers
    with pytest.raises(UserError, match="a stream has no epochs"):
        overrides.apply(pages.find("tiny", "full"), ["data.streaming=true", "max_steps=9", "eval_steps=epoch"])


def test_data_that_a_run_does_not_reach_is_named():
    recipe = replace(pages.find("tiny", "full"), epochs=0.7, max_steps=None, global_batch_size=8, eval_steps=None)
    (line,) = updates.left_out(recipe, size(380, 127))
    assert line == (
        "epochs=0.7: 12 of an epoch's 16 updates, so about 25% of the training data is not used; "
        "epochs=1 uses all of it"
    )
    (line,) = updates.left_out(replace(recipe, max_steps=4), size(380, 127))
    assert line.startswith("max_steps=4: 4 of an epoch's 16 updates, so about 75%") and "max_steps=16 uses" in line
    for enough in ({"epochs": 1.0}, {"epochs": 3.0}, {"max_steps": 16}, {"max_steps": 40}):
        assert updates.left_out(replace(recipe, **enough), size(380, 127)) == [], enough


def test_a_warm_up_longer_than_the_run_is_named():
    recipe = replace(pages.find("tiny", "full"), epochs=1.0, global_batch_size=8, learning_rate=2e-3, eval_steps=None)
    for kind in ("linear", "cosine", "constant_with_warmup"):
        (line,) = updates.left_out(replace(recipe, schedule=Schedule(kind, 500)), size(380, 127))
        assert "schedule.warmup=500: the learning rate rises for 500 updates and the run has 16, so it never" in line
        assert "reaches 0.002" in line
    for enough in (Schedule("constant", 500), Schedule("cosine", 16), Schedule("cosine", 0.5), Schedule("cosine", 0)):
        assert updates.left_out(replace(recipe, schedule=enough), size(380, 127)) == [], enough


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"early_stopping": 2}, "warning: early_stopping=2: 16 steps with an evaluation every 17 end before it can"),
        ({"keep_best": True}, "eval_steps=17: with 16 steps in all, the run is evaluated only before and after"),
        ({"eval_steps": None, "keep_best": True, "save_steps": 20}, "save_steps=20: with 16 steps in all, the run is"),
        ({"eval_steps": 16}, ""),
        ({"eval_steps": 16, "on_spike": "stop", "logging_steps": 1}, "warning: on_spike=stop: needs 64 logged losses"),
        ({"eval_steps": None, "save_steps": 20}, ""),
    ],
)
def test_evaluations_behind_the_last_step_are_named(settings, said):
    recipe = replace(pages.find("tiny", "full"), max_steps=16, **{"eval_steps": 17, **settings})
    lines = updates.unreached(recipe, 16)
    assert len(lines) == bool(said) and all(line.startswith(said) for line in lines)


@given(
    st.integers(1, 3000),
    st.integers(1, 40),
    st.integers(1, 8),
    st.integers(1, 8),
    st.sampled_from([1, 2, 4, 8]),
    st.floats(0.1, 20),
    st.booleans(),
)
def test_whoever_follows_the_advice_gets_a_dozen_updates(documents, per_sequence, micro, times, ranks, epochs, packing):
    recipe = pages.find("tiny", "full")
    batch = micro * times * ranks
    recipe = replace(recipe, micro_batch_size=micro, global_batch_size=batch, epochs=epochs, packing=packing)
    data = size(documents, -(-documents // per_sequence) if packing else documents)
    said = updates.advice(recipe, data, ranks)
    enough = data.sequences >= batch and updates.in_all(recipe, data.sequences) >= updates.ENOUGH
    assert (said is None) == enough
    if said is None:
        return
    ways = re.search(r"use (.*)\.$", said)[1].split(", or ")
    for way in ways:
        mended = overrides.apply(recipe, way.split())
        gradient_accumulation_steps(mended, ranks)  # raises where the batch is not divisible
        sequences = data.sequences if mended.packing else data.documents
        assert updates.in_all(mended, sequences) >= updates.ENOUGH, way


@pytest.mark.parametrize("variant", ["grpo", "kto_lora", "dpo_lora", "embed", "full"])
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("family", ["tiny", "llama3-1b"])
def test_the_advice_is_accepted_by_every_method(variant, ranks, family):
    """By the recipe, by what is checked before a run, and without a word about the number of updates."""
    recipe = pages.find(family, variant)
    for examples in (1, 3, 8, 12, 40, 95, 96, 200, 500):
        for batch in (recipe.global_batch_size * ranks, recipe.global_batch_size * ranks * 4):
            asked = replace(recipe, global_batch_size=batch, max_steps=None, epochs=1)
            sequences = examples * (asked.method.group_size * asked.method.iterations if variant == "grpo" else 1)
            said = updates.advice(asked, updates.Size(examples, sequences, sequences, None), ranks)
            ways = re.search(r"use (.*)\.$", said or "")
            for way in ways[1].split(", or ") if ways else ():
                mended = overrides.apply(asked, way.split())
                gradient_accumulation_steps(mended, ranks)
                assert mended.micro_batch_size >= mended.method.least_micro_batch, way
                assert updates.in_all(mended, sequences) >= updates.ENOUGH, (examples, way)
                if variant in ("grpo", "embed"):
                    assert sequences >= mended.global_batch_size, "a step is always whole"
                if variant == "kto_lora":
                    assert sequences >= mended.micro_batch_size * ranks, "the others are left out"


def rates(tmp_path, kind, warmup, steps):
    """Return the learning rate of every update, as the run's trainer schedules it."""
    trainer = object.__new__(RunTrainer)
    recipe = replace(pages.find("tiny", "full"), schedule=Schedule(kind, warmup))
    trainer.context = SimpleNamespace(recipe=recipe)
    trainer.args = TrainingArguments(str(tmp_path), use_cpu=True)
    trainer.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    trainer.lr_scheduler = None
    schedule = trainer.create_scheduler(steps)
    assert trainer.create_scheduler(steps) is schedule
    found = []
    for _ in range(steps):
        found += schedule.get_last_lr()
        trainer.optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("kind", ["constant", "constant_with_warmup", "linear", "cosine"])
def test_no_update_has_rate_zero(tmp_path, kind):
    for warmup, steps in ((0.03, 1), (0.03, 2), (0.1, 30), (5, 30), (0, 1), (0, 7)):
        found = rates(tmp_path, kind, warmup, steps)
        assert all(rate > 0 for rate in found), (warmup, steps, found)
        full = updates.warmup(replace(pages.find("tiny", "full"), schedule=Schedule(kind, warmup)), steps)
        assert (full == 0) == (kind == "constant" or not warmup)
        rising = max(0, full - 1)
        assert found[rising] == pytest.approx(1), (warmup, steps, found)
        assert found[:rising] == pytest.approx([(k + 1) / full for k in range(rising)])


def test_the_warm_up_of_transformers_begins_at_zero():
    """`create_scheduler` in src/deepspeed_recipes/training/trainer.py can go when it does not."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    assert get_scheduler("cosine", optimizer, num_warmup_steps=1, num_training_steps=1).get_last_lr() == [0.0]


@pytest.fixture(scope="module")
def alpaca(tmp_path_factory):
    """Write sixty examples in Alpaca's form."""
    path = tmp_path_factory.mktemp("alpaca") / "train.jsonl"
    rows = [{"instruction": f"Double {n}.", "output": f"It is {2 * n}."} for n in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_too_few_updates_are_said_before_the_launch_where_the_files_tell(alpaca, capsys):
    def said(*words):
        assert launch.main(["tiny", "full", f"data.path={alpaca}", "--dry-run", *words]) == 0
        return "warning: 60 examples in 60 sequences: 8 updates per epoch, 6 in all" in capsys.readouterr().out

    assert said("packing=false")
    assert not said(), "how many sequences they are packed into is not known yet"
    assert not said("packing=false", "epochs=3")
    assert not said("packing=false", "max_steps=3")


def train(ranks, tmp_path, recipe):
    """Run a recipe on two ranks; return its folder, the ranks' exit statuses and what each printed."""
    run = RunFolder(tmp_path / "run")
    write_recipe(run, recipe)
    statuses = ranks.run(training_run.main, str(run.path), log=tmp_path / "log")
    return run, statuses, read_logs(tmp_path / "log")


def test_a_run_of_one_step_learns_and_was_warned_of(ranks, tmp_path, model_folder, alpaca):
    recipe = small(model_folder, alpaca, "zero2.json", max_steps=None, packing=True, sequence_length=1024)
    recipe = replace(recipe, lora=Lora(rank=4, alpha=8), schedule=Schedule("cosine", 0.03))
    run, statuses, (screen, _) = train(ranks, tmp_path, recipe)
    assert statuses == [0, 0], screen
    (only,) = read_jsonl(run.metrics)
    assert only["step"] == 1 and only["grad_norm"] > 0
    assert "steps per epoch" in screen and "epochs=12" in screen
    assert f"training loss: {only['loss']:.4f}, before the only update" in screen
    assert read_json(run.summary)["warning"].startswith("warning: 60 examples in ")
    assert screen.count("warning: 60 examples in ") == 2 and "warning: 60 examples in " in screen.split("\ntrained ")[1]


UNMOVED = {
    "full": {"deepspeed": "zero3.json"},
    "lora": {"deepspeed": "zero2.json", "lora": Lora(rank=4, alpha=8)},
    "offload": {"deepspeed": "zero3_offload.json"},
    "pipeline": {"deepspeed": "pipeline.json", "layout": Layout(pipeline=2)},
    "tensor": {"deepspeed": "zero1.json", "layout": Layout(tensor=2)},
}


@pytest.mark.parametrize("case", tiered(UNMOVED, core=["full"]))
def test_a_run_that_does_not_move_the_weights_fails(ranks, tmp_path, model_folder, conversations, case):
    changes = dict(UNMOVED[case])
    recipe = small(model_folder, conversations, changes.pop("deepspeed"), max_steps=2, weight_decay=0.0, **changes)
    run, statuses, screens = train(ranks, tmp_path, replace(recipe, learning_rate=1e-30))
    assert set(statuses) == {2}, screens
    assert "the trained weights have not changed after 2 steps" in "".join(screens)
    assert "Traceback" not in "".join(screens) and not run.export.exists() and not run.summary.exists()


@pytest.mark.parametrize(("norms", "learned"), [([0.0, 0.0], False), ([0.0, 1e-8], True), ([], True)])
def test_weights_that_only_decay_have_learned_nothing(tmp_path, monkeypatch, norms, learned):
    recipe = small(tmp_path, tmp_path / "data.jsonl", weight_decay=0.1)
    state = SimpleNamespace(global_step=2, log_history=[{"grad_norm": norm} for norm in norms] + [{"loss": 1.0}])
    context = SimpleNamespace(recipe=recipe, run=RunFolder(tmp_path), checkpoint=None)
    trainer = SimpleNamespace(context=context, state=state, start=[1], model=None)
    monkeypatch.setattr(training_run.distributed, "total", lambda *numbers: numbers)
    monkeypatch.setattr(training_run.holdings, "moved", lambda start, model: True)
    with contextlib.nullcontext() if learned else pytest.raises(UserError, match="have only decayed after 2 steps"):
        training_run.check_moved(trainer)


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


def test_a_warm_up_that_begins_above_zero_is_a_share_of_the_runs_own_steps():
    recipe = replace(pages.find("tiny", "full"), schedule=Schedule("cosine_warmup_with_min_lr", 0.2, min_rate=0.1))
    assert [rate_schedule(recipe, 10)(step) for step in range(3)] == pytest.approx([0.5, 1, 0.9657], abs=1e-4)
    assert updates.warmup(recipe, 10) == 2


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
    run = run_on(ranks, recipe, tmp_path)
    assert [row["learning_rate"] for row in read_jsonl(run.metrics)] == pytest.approx(theirs(name))


def test_a_warm_up_longer_than_the_run_has_a_rate_everywhere():
    for name, (schedule, _) in CASES.items():
        shape = rate_schedule(replace(pages.find("tiny", "full"), schedule=Schedule(name, 50)), 4)
        rates = [shape(step) for step in range(5)]
        assert all(0 < rate <= 1 for rate in rates[:4]), (name, rates, schedule)


@pytest.mark.parametrize(("warmup", "decay", "left"), [(2, 50, 7), (0, 9, 8), (0.5, 0.8, 4)])
def test_a_fall_longer_than_the_run_begins_at_the_full_rate(warmup, decay, left):
    recipe = replace(pages.find("tiny", "full"), eval_steps=None, global_batch_size=16)
    recipe = replace(recipe, max_steps=STEPS, schedule=Schedule("warmup_stable_decay", warmup, decay=decay))
    shape = rate_schedule(recipe, STEPS)
    falling = [shape(step) for step in range(STEPS - left, STEPS)]
    assert falling[0] == 1 and falling == sorted(set(falling), reverse=True)
    (line,) = updates.left_out(recipe, size(128, 128))
    assert f"schedule.decay={decay}: a fall of " in line and "falls as soon as the warm-up ends" in line


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
