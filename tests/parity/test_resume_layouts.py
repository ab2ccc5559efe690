"""A run that goes on with another number of ranks logs what the uninterrupted one logs."""

import shutil
from dataclasses import replace

import pytest

from recipes.spec.recipe import Lora, Schedule
from recipes.spec.run_folder import RunFolder, forget_after, newest_checkpoint, read_jsonl, write_recipe
from recipes.training import run as training_run
from recipes.training import universal
from tests.small import small

STEPS = 6
LORA = Lora(rank=4, alpha=8)
CASES = {
    "zero0": ("zero0.json", None),
    "zero1": ("zero1.json", None),
    "zero2": ("zero2.json", None),
    "zero3": ("zero3.json", None),
    "lora": ("zero2.json", LORA),
    "lora_zero3": ("zero3.json", LORA),
}


def recipe_of(case, model_folder, conversations):
    config, lora = CASES[case]
    recipe = small(model_folder, conversations, config, lora=lora, max_steps=STEPS, save_steps=3)
    # An epoch and a half, in batches that differ, at rates that differ: a wrong order of the data would show.
    return replace(recipe, global_batch_size=4, micro_batch_size=1, schedule=Schedule("cosine", 0.1))


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory, model_folder, conversations):
    """Return the uninterrupted run of a case by `written_by` ranks, trained once."""
    done = {}

    def of(case, written_by):
        if (case, written_by) not in done:
            folder = tmp_path_factory.mktemp("whole")
            run = done[case, written_by] = RunFolder(folder / "run")
            write_recipe(run, recipe_of(case, model_folder, conversations))
            ranks.check(training_run.main, str(run.path), world_size=written_by, log=folder / "log")
        return done[case, written_by]

    return of


def stopped_after_three(whole, folder):
    """Return a copy of the run as it was after its third step."""
    run = RunFolder(folder / "resumed")
    shutil.copytree(whole.path, run.path)
    shutil.rmtree(run.checkpoints / f"checkpoint-{STEPS}")
    shutil.rmtree(run.export)
    forget_after(run, newest_checkpoint(run))
    return run


@pytest.mark.parametrize(("written_by", "resumed_by"), [(2, 1), (2, 4), (1, 2), (4, 2)])
@pytest.mark.parametrize("case", CASES)
def test_same_losses_with_another_number_of_ranks(ranks, tmp_path, whole, case, written_by, resumed_by):
    run = stopped_after_three(whole(case, written_by), tmp_path)
    if universal.is_needed(run, resumed_by):
        universal.convert(newest_checkpoint(run))
    ranks.check(training_run.main, str(run.path), world_size=resumed_by, log=tmp_path / "log")
    expected, got = read_jsonl(whole(case, written_by).metrics), read_jsonl(run.metrics)
    assert [row["step"] for row in got] == list(range(1, STEPS + 1))
    for ours, theirs in zip(got, expected, strict=True):
        for key in ("loss", "grad_norm", "learning_rate"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5), (ours["step"], key)
        assert ours["tokens"] == theirs["tokens"]
