"""A run that was killed resumes as if it had not been.

A finished run that goes on: with more steps or epochs, or after it stopped early.
"""

import contextlib
import glob
import json
import math
import os
import pickle
import signal
import subprocess
import time
from dataclasses import replace

import pytest
import torch

from deepspeed_recipes.commands import launch
from deepspeed_recipes.launching import paths, restarts
from deepspeed_recipes.launching.paths import locate
from deepspeed_recipes.recipe import deepspeed_file, overrides, pages, run_folder
from deepspeed_recipes.recipe.conversions import to_dict
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.recipe import Draft, Lora, Schedule, Wandb
from deepspeed_recipes.recipe.run_folder import (
    COMPLETE,
    RunFolder,
    append_jsonl,
    forget_after,
    newest_checkpoint,
    read_json,
    read_jsonl,
    read_recipe,
    step_of,
    write_json,
    write_recipe,
)
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training.callbacks.stopping import StopOnSignal
from deepspeed_recipes.training.checkpoint import universal
from deepspeed_recipes.training.model.draft import TINY_MODEL
from deepspeed_recipes.training.model_folder import record
from deepspeed_recipes.training.optimizer import rate_schedule
from tests.launching import BIN
from tests.ranks import read_logs, run_on
from tests.small import small
from tests.tiers import tiered

STEPS = 16
LORA = Lora(rank=4, alpha=8, dropout=0.1)
"""With dropout, so that a lost random state would show."""

CASES = {
    "zero0": ("zero0.json", None),
    "zero1": ("zero1.json", None),
    "zero2": ("zero2.json", None),
    "zero3": ("zero3.json", None),
    "lora": ("zero2.json", LORA),
    "lora_zero3": ("zero3.json", LORA),
}


@pytest.mark.parametrize("case", tiered(CASES, {"zero1"}))
def test_a_resumed_run_logs_what_an_uninterrupted_one_logs(ranks, tmp_path, model_folder, conversations, case):
    config, lora = CASES[case]
    recipe = small(model_folder, conversations, config, lora=lora, max_steps=STEPS, save_steps=5)
    # Two epochs and a half, in batches that differ: a wrong data order would show.
    recipe = replace(recipe, global_batch_size=2, micro_batch_size=1, schedule=Schedule("cosine", 0.1))
    whole, killed = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "killed")
    write_recipe(whole, recipe)
    write_recipe(killed, recipe)
    ranks.check(training_run.main, str(whole.path), log=tmp_path / "whole.log")

    kill_one_rank_after(ranks, killed, 7, tmp_path / "killed.log")
    checkpoint = newest_checkpoint(killed)
    assert step_of(checkpoint) >= 5
    forget_after(killed, checkpoint)
    ranks.check(training_run.main, str(killed.path), log=tmp_path / "resumed.log")

    reference, resumed = read_jsonl(whole.metrics), read_jsonl(killed.metrics)
    assert [row["step"] for row in resumed] == list(range(1, STEPS + 1))
    for expected, got in zip(reference, resumed, strict=True):
        for key in ("loss", "grad_norm", "learning_rate"):
            assert got[key] == pytest.approx(expected[key], rel=1e-5), (case, got["step"], key)
        assert got["tokens"] == expected["tokens"]
    if lora:
        losses = [row["loss"] for row in reference]
        assert len(set(losses)) == STEPS


def test_a_resumed_run_saves_and_logs_as_often_as_it_says_now(ranks, tmp_path, model_folder, conversations):
    recipe = small(model_folder, conversations, max_steps=4, save_steps=2, logging_steps=1)
    recipe = replace(recipe, schedule=Schedule("constant", warmup=0))
    run = run_on(ranks, recipe, tmp_path)
    for log in (run.metrics, run.rollouts):
        append_jsonl(log, read_jsonl(run.metrics)[-1] | {"step": 5})  # trained after the last checkpoint
    write_json(run.summary, read_json(run.summary) | {"steps": 5})
    before = {file: file.read_bytes() for file in sorted(run.path.rglob("*")) if file.is_file()}
    states = [file for file in before if file.name.endswith("_states.pt") and "checkpoint-4" in str(file)]
    assert states
    for seed, where in ((recipe.seed + 1, "before there is an engine"), (recipe.seed, "by the engine")):
        if seed == recipe.seed:
            for file in states:
                file.write_bytes(pickle.dumps(print).ljust(len(before[file]), b"\0"))
        forget_after(run, newest_checkpoint(run))
        write_recipe(run, replace(recipe, seed=seed, max_steps=9))
        assert ranks.run(training_run.main, str(run.path), log=tmp_path / "refused.log") == [2, 2], where
        for file in states:
            file.write_bytes(before[file])
        assert [row["step"] for row in read_jsonl(run.metrics)] == [1, 2, 3, 4] and not run.rollouts.exists()
        run_folder.discard_requested(run, recipe=False)
        after = {file: file.read_bytes() for file in before}
        assert run.summary in before and not run_folder.is_finished(run)
        changed = {file for file in before if before[file] != after[file]}
        assert all(file.parent == run.ranks or file == run.report_page for file in changed), (where, changed)
    resumed = replace(recipe, max_steps=9, save_steps=5, logging_steps=3)
    forget_after(run, newest_checkpoint(run))
    write_recipe(run, resumed)
    ranks.check(training_run.main, str(run.path), log=tmp_path / "resumed.log")
    assert read_recipe(run) == resumed and not [*run.path.glob("*.requested.json"), *run.path.glob("*.before.*")]
    assert read_json(run.environment) != json.loads(before[run.environment])
    assert (run.checkpoints / "checkpoint-5").exists() and not (run.checkpoints / "checkpoint-6").exists()
    steps = [row["step"] for row in read_jsonl(run.metrics)]
    assert steps[:4] == [1, 2, 3, 4] and 7 not in steps and steps[-1] == 9
    assert run_folder.is_finished(run) and read_json(run.summary)["steps"] == 9
    forget_after(run, newest_checkpoint(run))
    write_recipe(run, replace(resumed, max_steps=5))
    ranks.check(training_run.main, str(run.path), log=tmp_path / "exported.log")
    assert "only measuring and exporting" in read_logs(tmp_path / "exported.log")[0]
    assert record.read(run.export).recipe.max_steps == read_recipe(run).max_steps == 5
    run.metrics.unlink()
    assert ranks.run(training_run.main, str(run.path), log=tmp_path / "without.log") == [2, 2]
    assert "metrics.jsonl: missing, so the run's end cannot" in read_logs(tmp_path / "without.log")[0]


@pytest.mark.every
def test_the_parts_of_a_restarted_run_are_one_run_of_wandb(ranks, tmp_path, model_folder, conversations, monkeypatch):
    run, pattern = RunFolder(tmp_path / "run"), "offline-run-*"
    write_recipe(run, small(model_folder, conversations, max_steps=12, save_steps=2, wandb=Wandb(mode="offline")))
    kill_one_rank_after(ranks, run, 5, tmp_path / "killed.log")
    (first,) = (run.path / "wandb").glob(pattern)
    forget_after(run, newest_checkpoint(run))
    time.sleep(1.1)  # W&B names a folder by the second
    ranks.check(training_run.main, str(run.path), log=tmp_path / "resumed.log")
    parts = sorted((run.path / "wandb").glob(pattern))
    kept = run.wandb_id.read_text().strip()
    assert len(parts) == 2 and parts[0] == first and all(part.name.endswith(f"-{kept}") for part in parts)
    (line,) = [line for line in read_logs(tmp_path / "resumed.log")[0].splitlines() if "wandb sync" in line]
    asked = line.split("wandb sync ")[1]
    assert sorted(glob.glob(asked)) == [str(part) for part in parts]
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    shown = subprocess.run(f"{BIN / 'wandb'} sync --dry-run {asked}", shell=True, capture_output=True, text=True)
    assert shown.returncode == 0 and all(part.name in shown.stdout + shown.stderr for part in parts), shown


def kill_one_rank_after(ranks, run, step, log):
    """Start a run and SIGKILL rank 1 once `step` has been logged; rank 0 must not go on alone."""
    processes = ranks.start(training_run.main, str(run.path), log=log)
    deadline = time.monotonic() + 120
    while not any(row["step"] >= step for row in read_jsonl(run.metrics)):
        assert time.monotonic() < deadline and processes[1].is_alive(), "\n".join(read_logs(log))
        time.sleep(0.02)
    os.kill(processes[1].pid, signal.SIGKILL)
    processes[0].join(20)
    if processes[0].is_alive():  # stuck in a collective; the launcher would end it
        os.kill(processes[0].pid, signal.SIGKILL)
    for process in processes:
        process.join()
    assert not run.summary.exists()


def test_a_signal_that_comes_late_does_not_end_a_run_that_is_stopping():
    """Hosts get it seconds apart, and the first one asks all ranks to stop."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for stopped, kept in ((True, signal.SIG_IGN), (False, signal.SIG_DFL)):
            stop = StopOnSignal(lambda: None)
            stop.stopped = stopped
            stop.on_train_end(None, None, None)
            assert {signal.getsignal(number) for number in before} == {kept}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_only_sigterm_and_sigint_ask_a_run_to_stop(monkeypatch):
    """With processes that read data PyTorch handles SIGCHLD, which comes at every end of Triton's compiler."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)}
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    seen = []
    stop = StopOnSignal(lambda: None)
    try:
        signal.signal(signal.SIGCHLD, lambda *_: seen.append(signal.SIGCHLD))
        stop.on_train_begin(None, None, None)
        subprocess.run(["true"], check=True)
        time.sleep(0.3)  # for the thread that listens
        assert seen and not stop.asked
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)
        assert stop.asked
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)


def test_half_a_checkpoint_is_never_chosen(tmp_path):
    run = RunFolder(tmp_path)
    for step, whole in ((5, True), (10, True), (15, False)):
        folder = run.checkpoints / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"weights")
        if whole:
            write_json(folder / COMPLETE, {"step": step, "world_size": 2, "layout": {}})
    for step in range(1, 14):
        append_jsonl(run.metrics, {"step": step})
    with run.metrics.open("a") as log:
        log.write('{"step": 14, "lo')
    chosen = newest_checkpoint(run)
    assert step_of(chosen) == 10
    forget_after(run, chosen)
    assert not (run.checkpoints / "checkpoint-15").exists()
    assert [row["step"] for row in read_jsonl(run.metrics)] == list(range(1, 11))


def test_a_checkpoint_that_lacks_its_mark_alone_is_kept_and_named(tmp_path, capsys):
    run = RunFolder(tmp_path)
    for step, names in ((5, ("trainer_state.json", COMPLETE)), (10, ("trainer_state.json",)), (15, ("model",))):
        for name in names:
            write_json(run.checkpoints / f"checkpoint-{step}" / name, {})
    forget_after(run, run.checkpoints / "checkpoint-5")
    assert {one.name for one in run.checkpoints.iterdir()} == {"checkpoint-5", "checkpoint-10-damaged"}
    said, named = capsys.readouterr()
    assert said == f"{run.checkpoints / 'checkpoint-15'}: removed, as it is after step 5 or incomplete\n"
    assert f"checkpoint-10 has no {COMPLETE}" in named and "now checkpoint-10-damaged; delete it" in named


@pytest.mark.parametrize("damage", [b'{"step": 2, "loss": \xff}\n', b'{"step": 2, "loss" 1}\n', b'"step": 2}\n'])
def test_a_damaged_line_of_a_log_is_named_and_nothing_is_lost(tmp_path, damage):
    run = RunFolder(tmp_path)
    content = b'{"step": 1}\n' + damage + b'{"step": 3, "lo{"step": 3}\n{"step": 4, "l'
    run.metrics.write_bytes(content)
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: not a JSON object; correct that line, or remove it"):
        forget_after(run, run.checkpoints / "checkpoint-2")
    assert run.metrics.read_bytes() == content
    run.metrics.write_bytes(content.replace(damage, b'{"note": 1}\n'))
    assert read_jsonl(run.metrics) == [{"step": 1}, {"note": 1}, {"step": 3}]
    forget_after(run, run.checkpoints / "checkpoint-2")
    assert read_jsonl(run.metrics) == [{"step": 1}, {"note": 1}]


@pytest.mark.parametrize("damage", [b"", b"[]", b"{}", b"3", b"\xff"])
def test_a_damaged_summary_is_named_with_a_fix(tmp_path, damage):
    run = RunFolder(tmp_path)
    assert not run_folder.has_ended(run)
    run.summary.write_bytes(damage)
    with pytest.raises(UserError, match=r"summary\.json: not a run's summary; restore it, or remove it") as refused:
        run_folder.has_ended(run)
    assert "\n" not in str(refused.value) and run.summary.read_bytes() == damage


def test_the_run_that_started_last_is_resumed_whatever_its_folder_is_called(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "runs", lambda: tmp_path)
    recipe = pages.find("tiny", "full")
    started = {"first": 10, "20261128-120000-2": 11, "20261128-120000-10": 12, "20261128-120000-9": None}
    for name, hour in started.items():
        run = RunFolder(tmp_path / recipe.name / name)
        write_recipe(run, recipe)
        write_json(run.checkpoints / "checkpoint-5" / COMPLETE, {"world_size": 2, "layout": {}})
        os.utime(run.recipe, (0, 0))
        if hour:
            write_json(run.environment, {"started": f"2026-11-28T{hour}:00:00+00:00"})
    assert run_folder.to_resume(recipe, None).path.name == "20261128-120000-10"
    os.utime(run.recipe)  # by its time alone
    assert run_folder.to_resume(recipe, None).path.name == "20261128-120000-9"


def test_a_run_that_cannot_be_resumed_is_answered_with_what_works(tmp_path):
    run, recipe = RunFolder(tmp_path / "run"), pages.find("tiny", "full")
    write_recipe(run, recipe)
    with pytest.raises(UserError, match=r"which --resume cannot continue; choose another --output-dir, or remove the"):
        run_folder.new(recipe, run.path)
    with pytest.raises(UserError, match=r"start without --resume, with another --output-dir or after removing"):
        run_folder.to_resume(recipe, run.path)
    write_json(run.checkpoints / "checkpoint-5" / COMPLETE, {"world_size": 2, "layout": {}})
    with pytest.raises(UserError, match=r"already has a run of tiny-3m-full; add --resume"):
        run_folder.new(recipe, run.path)


CHANGES = {
    "precision=bf16": r"precision=bf16: .*checkpoint-5 holds weights and states of a run with fp32",
    "precision=fp16": r"precision=fp16: .*of a run with fp32",
    "layer_decay=0.9": r"layer_decay=0\.9: .*of a run with 1",
    "optimizer=adamw_8bit": r"optimizer=adamw_8bit: .*of a run with adamw",
    "eval_examples=8": r"eval_examples=8: .*of a run with none",
    "lora.alpha=16": r"lora\.alpha=16: .*holds adapters with 8",
    "lora.rank=8": r"lora\.rank=8: .*holds adapters with 4",
    "lora.target_modules=q_proj": r"lora\.target_modules=q_proj: .*holds adapters with all-linear",
    "lora.plus_ratio=16": r"lora\.plus_ratio=16\.0: .*holds adapters with 1\.0",
    "deepspeed=zero3.json": r"deepspeed=zero3\.json: .*was written under ZeRO-1",
    "deepspeed=zero1_bf16_states.json": r"=zero1_bf16_states\.json: its (bf16|data_types) block",
    "layout.tensor=2": r"layout\.tensor=2: .*was written with 1",
    "layout.pipeline=2": r"layout\.pipeline=2: .*was written with 1",
}
"""Changes after which the states of a checkpoint could not be loaded, or would be others'."""
ACCEPTED = ("learning_rate=1e-5", "max_steps=99", "micro_batch_size=2", "gradient_checkpointing=false", "save_steps=7")


def test_a_resume_with_settings_that_the_checkpoint_does_not_fit_is_refused(tmp_path, model_folder, conversations):
    run = RunFolder(tmp_path)
    recipe = paths.locate(small(model_folder, conversations, deepspeed="zero1.json", precision="fp32", lora=LORA))
    recipe = replace(recipe, data=replace(recipe.data, validation=recipe.data.path), eval_steps=5, early_stopping=3)
    write_recipe(run, recipe)
    write_json(run.deepspeed, {"zero_optimization": {"stage": 1}})
    write_json(run.checkpoints / "checkpoint-5" / COMPLETE, {"step": 5, "world_size": 2, "layout": {}, "files": {}})

    def check(change):
        changed = paths.locate(overrides.apply(recipe, [change]))
        universal.check(changed, run, deepspeed_file.read(changed.deepspeed), 2)

    for change, said in CHANGES.items():
        with pytest.raises(UserError, match=said) as refused:
            check(change)
        assert "\n" not in str(refused.value) and ("leave" in str(refused.value) or "use " in str(refused.value))
    for change in ACCEPTED:
        check(change)
    for other, said in (
        (replace(recipe, lora=None), r"lora: .* holds all weights, without adapters; use the variant of that run"),
        (replace(recipe, draft=Draft(enabled=True)), r"draft\.enabled=false: .* of a run with true; leave"),
    ):
        write_json(run.recipe, to_dict(other))
        with pytest.raises(UserError, match=said):
            check("max_steps=99")


EDITS = {
    "data_types": (
        {"data_types": {"grad_accum_dtype": "bf16"}},
        r"=own\.json: its data_types block .*; use",
    ),
    "bf16": ({"bf16": {"enabled": "auto", "bf16_optimizer_states": True}}, r"=own\.json: its bf16 block"),
    "optimizer": ({"optimizer": {"type": "Lion"}}, r"=own\.json: its optimizer is Lion, and .* the states of adamw"),
    "accepted": ({"bf16": {"enabled": False}, "optimizer": {"type": "AdamW"}, "gradient_clipping": 2.0}, None),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_deepspeed_file_that_was_edited_in_place_is_compared_as_another_file_is(name, tmp_path, conversations):
    run, file = RunFolder(tmp_path / "run"), tmp_path / "own.json"
    write_json(file, {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}})
    recipe = paths.locate(small(TINY_MODEL, conversations, deepspeed=str(file), precision="fp32"))
    write_recipe(run, recipe)
    write_json(run.deepspeed, {"zero_optimization": {"stage": 2}, "bf16": {"enabled": False}})
    write_json(run.checkpoints / "checkpoint-5" / COMPLETE, {"step": 5, "world_size": 2, "layout": {}, "files": {}})
    universal.check(recipe, run, deepspeed_file.read(file), 2)
    change, said = EDITS[name]
    write_json(file, read_json(file) | change)
    with pytest.raises(UserError, match=said) if said else contextlib.nullcontext():
        universal.check(recipe, run, deepspeed_file.read(file), 2)


def test_the_launcher_prints_what_a_resumed_run_changes(tmp_path, printed_by):
    run = RunFolder(tmp_path)
    write_recipe(run, paths.locate(pages.find("tiny", "full")))
    write_json(run.deepspeed, {"zero_optimization": {"stage": 3}})
    write_json(run.checkpoints / "checkpoint-5" / COMPLETE, {"step": 5, "world_size": 2, "layout": {}, "files": {}})
    command = ["tiny", "full", "--resume", "--output-dir", str(tmp_path), "--gpus", "2", "--dry-run"]
    # The page holds out a file of its own, which other data does not change in a run.
    data = f"data.path={tmp_path / 'other.jsonl'}"
    (tmp_path / "other.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 9)
    for changes in (["learning_rate=1e-05", "weight_decay=0.5"], [data], [data, "data.validation=none"], []):
        said = f"resuming with changed settings: {' '.join(changes)}\n" in printed_by("launch", *command, *changes)
        assert said == bool(changes)


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
        ([], {"max_steps": 10}, "has finished its 10 steps; add max_steps=20."),
        (["max_steps=10"], {"max_steps": 10}, "has finished its 10 steps; add max_steps=20."),
        (["max_steps=5"], {"max_steps": 10}, "has finished its 10 steps"),
        ([], {"max_steps": None, "epochs": 2.0}, "has finished its 10 steps; add epochs=3."),
        (["epochs=1"], {"max_steps": None, "epochs": 2.0}, "has finished its 10 steps; add epochs=3."),
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
    run = run_on(ranks, recipe, tmp_path)
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


def test_a_stopped_run_is_no_success_for_a_shell(tmp_path):
    run, recipe = RunFolder(tmp_path), pages.find("tiny", "full")
    write_json(run.summary, {"stopped": True, "steps": 3})
    for stopped, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (0, 143)):  # 0: a rank got it
        outcome = restarts.Outcome(0, None, stopped)
        assert restarts.run_with_restarts(recipe, run, 2, 0, lambda _, ended=outcome: ended, lambda: 2) == status
    write_json(run.summary, {"stopped": False, "steps": 9})
    finished = restarts.Outcome(0, None, signal.SIGINT)
    assert restarts.run_with_restarts(recipe, run, 2, 0, lambda _: finished, lambda: 2) == 0, "it came too late"
