"""Sweeps: which trials there are, what is refused before any starts, and real ones, failed and resumed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from deepspeed_recipes.commands import main, sweep
from deepspeed_recipes.commands.launch import options
from deepspeed_recipes.commands.sweep import trials
from deepspeed_recipes.commands.sweep.trials import Result
from deepspeed_recipes.recipe import overrides
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.project import SAMPLES
from deepspeed_recipes.recipe.run_folder import RunFolder, newest_checkpoint, read_json, read_jsonl
from tests import ROOT


def test_a_grid_has_every_combination_once():
    found = sweep.read_space(["learning_rate=1e-4,3e-4", "max_steps=7", "lora.rank=8,16,32", "packing=no"])
    assert found.fixed == ("max_steps=7", "packing=no") and found.keys == ["learning_rate", "lora.rank"]
    expected = [[f"learning_rate={rate}", f"lora.rank={rank}"] for rate in ("1e-4", "3e-4") for rank in (8, 16, 32)]
    assert sweep.grid(found, 6) == expected
    listed = sweep.read_space(["data.path=a.jsonl,b.jsonl;c.jsonl", "lora.target_modules=q_proj,v_proj"])
    assert listed.lists == {"data.path": ("a.jsonl,b.jsonl", "c.jsonl")}
    assert listed.fixed == ("lora.target_modules=q_proj,v_proj",)


def test_random_trials_differ_and_repeat_with_their_seed():
    found = sweep.read_space(["learning_rate=1e-5..1e-3", "lora.rank=4..64", "seed=1,2", "weight_decay=0..0.1"])
    drawn = sweep.at_random(found, 40, 3, 64)
    assert drawn == sweep.at_random(found, 40, 3, 64) != sweep.at_random(found, 40, 4, 64)
    assert len({tuple(trial) for trial in drawn}) == 40
    values = [dict(word.split("=") for word in trial) for trial in drawn]
    rates = [float(one["learning_rate"]) for one in values]
    assert min(rates) >= 1e-5 and max(rates) <= 1e-3 and 10 < sum(rate < 1e-4 for rate in rates) < 30
    assert all(4 <= int(one["lora.rank"]) <= 64 and 0 <= float(one["weight_decay"]) <= 0.1 for one in values)
    assert {one["seed"] for one in values} == {"1", "2"}
    few = sweep.read_space(["lora.rank=8,16", "seed=1,2"])
    assert sorted(sweep.at_random(few, 4, 0, 64)) == sorted(sweep.grid(few, 64))


def test_keys_whose_values_have_commas_are_known():
    said = {name for name, key in options.keys().items() if "commas" in key.meaning}
    assert said | {"data.validation"} == overrides.comma_keys()


def test_a_dry_run_prints_the_trials_of_a_model_without_a_page(tmp_path, monkeypatch, printed_by):
    model = tmp_path / "mine"
    shutil.copytree(SAMPLES / "tiny_model", model)
    monkeypatch.chdir(tmp_path)
    first, *commands = printed_by(
        "sweep", "auto", "mine", "learning_rate=1e-4,3e-4", "max_steps=5", "--draft", "--dry-run"
    ).splitlines()
    assert first.startswith("2 trials") and "mine-lora" in first and len(commands) == 2
    assert commands[0].endswith("launch.py auto mine lora --draft max_steps=5 learning_rate=1e-4")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"], "nothing is written"


MISTAKES = {
    "no list": (["max_steps=3"], "nothing to sweep over: list the values of a key"),
    "nothing": ([], "nothing to sweep over"),
    "unknown key": (["lerning_rate=1,2"], "Did you mean 'learning_rate'?"),
    "one value": (["learning_rate=1e-4,"], "has only one value; list at least two"),
    "one value twice": (["learning_rate=1e-4,0.0001"], "0.0001 is listed twice"),
    "key twice": (["seed=1,2", "seed=3"], "seed is given twice"),
    "type": (["lora.rank=8,many"], "lora.rank=many: must be a whole number"),
    "not an override": (["rank"], "'rank' is not an override"),
    "too many": (["seed=" + ",".join(map(str, range(65)))], "65 trials (65 of seed) are more than 64"),
    "too many at random": (["seed=1..1000", "--random", "65"], "--random 65: more than 64 trials; allow them with"),
    "fewer than asked": (["seed=1,2", "--random", "5"], "there are only 2 different trials"),
    "range in a grid": (["learning_rate=1e-5..1e-3"], "a range needs --random N"),
    "range backwards": (["learning_rate=1e-3..1e-5", "--random", "3"], "from a lower to a higher number"),
    "seed of a grid": (["seed=1,2", "--seed", "3"], "--seed 3: only with --random N"),
    "fixed value": (["seed=1,2", "dpo.beta=0"], "dpo.beta=0: must be above 0"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_get_a_line_before_anything_starts(tmp_path, refusal, case):
    words, said = MISTAKES[case]
    folder = tmp_path / "sweep"
    error = refusal("sweep", "tiny", "full", "--output-dir", folder, *words)
    assert said in error and error.count("\n") <= 2 and not folder.exists()


def test_a_folder_with_something_else_is_left_alone(tmp_path):
    one = trials.Sweep("tiny", "full", (), (), (("seed=1",), ("seed=2",)))
    trials.opened(tmp_path / "new", one)
    trials.opened(tmp_path / "new", one)
    with pytest.raises(UserError, match="another sweep"):
        trials.opened(tmp_path / "new", replace(one, trials=(("seed=1",), ("seed=3",))))
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="is not a sweep"):
        trials.opened(tmp_path, one)


def test_the_best_trial_comes_first():
    lost = Result(1, ("seed=1",), 1, "no reason")
    results = [lost, *(Result(at, (f"seed={at}",), 0, None, "loss", at / 10, at / 10) for at in (4, 2, 3))]
    assert [one.trial for one in trials.ranked(results)] == [2, 3, 4, 1]
    right = [replace(one, metric="exact_match") for one in results]
    assert [one.trial for one in trials.ranked(right)] == [4, 3, 2, 1]
    same = [replace(one, metric="exact_match", score=0.5) for one in results[1:]]
    assert [one.trial for one in trials.ranked(same)] == [2, 3, 4], "of equal scores the lower held-out loss"
    assert trials.draw([lost], ["seed"], None) is False


def test_scores_that_do_not_compare_are_named():
    first = Result(1, ("seed=1",), 0, None, "loss", 0.1, held_out="a")
    failed = Result(2, ("seed=2",), 1, "no reason")
    assert trials.judged_apart([first, replace(first, trial=3), failed]) is None
    assert "they are exact_match, loss" in trials.judged_apart([first, replace(first, metric="exact_match")])
    assert "on different examples" in trials.judged_apart([first, replace(first, held_out="b")])


@pytest.mark.parametrize(
    ("metric", "order", "lower", "higher"),
    [
        ("loss", [2, 3, 1, 4, 5], "0.2500 ± 0.0707 (2)", "0.5000 ± 0.5657 (2)"),
        ("exact_match", [4, 1, 3, 2, 5], "25.0% ± 7.1% (2)", "50.0% ± 56.6% (2)"),
    ],
)
def test_the_best_of_several_seeds_is_that_of_the_best_mean(metric, order, lower, higher):
    """Trial 1 has the lowest loss, and its settings have the higher mean."""
    scores = {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.9}
    results = [
        Result(at, (f"lora.rank={8 if at in (1, 4) else 16}", f"seed={at}"), 0, None, metric, score, score)
        for at, score in scores.items()
    ]
    results.append(Result(5, ("lora.rank=4", "seed=1"), 1, "no reason"))
    assert [one.trial for one in trials.ranked(results)] == order
    shown = trials.table(results, ["lora.rank", "seed"])
    columns = {str(column.header): list(column.cells) for column in shown.columns}
    assert sorted(cell for cell in columns["mean over seeds"] if cell) == ["-", lower, higher]
    assert "held-out loss" not in columns
    alone = trials.table(results[:2], ["lora.rank", "seed"])
    assert "mean over seeds" not in [column.header for column in alone.columns]


def sweep_words(folder, model_folder, conversations, *words):
    data = [f"model.path={model_folder}", f"data.path={conversations}", f"data.validation={conversations}"]
    fixed = ["data.metric=loss", "packing=false", "sequence_length=128", "global_batch_size=4", "wandb.mode=disabled"]
    fixed += ["logging_steps=1", "precision=fp32", "deepspeed=zero1.json", "gradient_checkpointing=false"]
    return ["tiny", "full", "--gpus", "1", "--output-dir", str(folder), *data, *fixed, *words]


@pytest.mark.every
def test_a_failed_trial_is_a_row_and_a_finished_one_is_not_run_again(
    launcher, tmp_path, model_folder, conversations, capsys
):
    """Through the real launcher; micro-batches of 3 do not divide the global batch of 4."""
    folder = tmp_path / "sweep"
    words = sweep_words(folder, model_folder, conversations, "max_steps=2", "save_steps=0", "micro_batch_size=2,3")
    assert main.run("sweep", words) == 1
    shown = capsys.readouterr().out
    rows = read_json(folder / "results.json")
    assert [(row["trial"], row["status"]) for row in rows] == [(1, 0), (2, 2)]
    run = RunFolder(folder / "trial-001")
    assert rows[0]["score"] == read_json(run.summary)["after"] == read_jsonl(run.evaluations)[-1]["loss"]
    assert read_json(run.recipe)["wandb"]["group"] == "sweep" and read_json(run.recipe)["micro_batch_size"] == 2
    assert (
        rows[1]["reason"]
        == "global_batch_size=4 is not a multiple of micro_batch_size=3; use global_batch_size=6 or micro_batch_size=1."
    )
    assert f"{rows[0]['score']:.4f}" in shown and "status 2: global_batch_size=4 is not a multiple" in shown
    assert (folder / "sweep.png").stat().st_size > 5_000
    written = run.metrics.stat().st_mtime_ns
    assert main.run("sweep", [*words, "--json"]) == 1
    told = capsys.readouterr()
    assert json.loads(told.out) == rows and "(finished before)" in told.err
    assert run.metrics.stat().st_mtime_ns == written


@pytest.mark.every
def test_an_interrupted_sweep_continues_where_it_was(launcher, tmp_path, model_folder, conversations):
    """The trial that Ctrl-C has stopped resumes from its checkpoint, and the better learning rate wins."""
    folder = tmp_path / "sweep"
    words = sweep_words(folder, model_folder, conversations, "max_steps=60", "save_steps=5", "micro_batch_size=2")
    command = [sys.executable, str(ROOT / "scripts" / "sweep.py"), *words, "learning_rate=1e-6,1e-2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0)
    second = RunFolder(folder / "trial-002")
    deadline = time.monotonic() + 300
    while not (second.metrics.exists() and len(read_jsonl(second.metrics)) > 5):
        assert time.monotonic() < deadline and process.poll() is None, process.stdout.read()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130 and "continues it" in output, output
    assert newest_checkpoint(second) and read_json(second.summary)["stopped"]
    first = RunFolder(folder / "trial-001").metrics.stat().st_mtime_ns
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert RunFolder(folder / "trial-001").metrics.stat().st_mtime_ns == first
    assert [row["step"] for row in read_jsonl(second.metrics)] == list(range(1, 61))
    assert "resuming from step" in (folder / "trial-002.log").read_text()
    assert [row["trial"] for row in read_json(folder / "results.json")] == [2, 1]
