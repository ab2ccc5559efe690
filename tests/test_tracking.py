"""What trackers have of a run, read back from their own files: every step once, and why it ended."""

import math
import os
import signal
import time
from dataclasses import replace

import pytest

from recipes.launching import restarts
from recipes.launching.supervise import Outcome
from recipes.spec.recipe import Wandb
from recipes.spec.run_folder import REWIND, RunFolder, read_json, read_jsonl, write_recipe
from recipes.training import run as training_run
from recipes.training.tracking import offline_records
from tests.nan_data import write_nan_data, write_nan_model
from tests.ranks import read_logs
from tests.small import small

KILLED = "rank 1 on this host was killed by SIGKILL"
BAD = 5
"""The number of the example with the NaN."""


def recorded(run, kind):
    """Return the W&B records of one kind in all parts of a run, in the order of the parts."""
    files = sorted((run.path / "wandb").glob("offline-run-*/*.wandb"))
    found = [record for file in files for record in offline_records.records(file)]
    return [getattr(record, kind) for record in found if record.HasField(kind)]


def values(history):
    """Return a W&B history record as numbers by key."""
    return {item.key or "/".join(item.nested_key): item.value_json for item in history.item}


@pytest.fixture(scope="module")
def survivor(ranks, tmp_path_factory, model_folder, conversations):
    """Train a run that rewinds, is killed, is killed again after its restart, and is resumed to its end by hand."""
    folder = tmp_path_factory.mktemp("survivor")
    data = write_nan_data(conversations, folder / "rows.jsonl", BAD)
    recipe = small(write_nan_model(model_folder, folder / "model"), data, "zero2.json", on_nan="rewind", max_steps=40)
    recipe = replace(recipe, save_steps=2, global_batch_size=2, micro_batch_size=1, learning_rate=1e-4)
    recipe = replace(recipe, tracking="wandb,tensorboard", wandb=Wandb("offline", group="proofs", tags="one,two"))
    run = RunFolder(folder / "run")
    write_recipe(run, recipe)
    kills = iter((9, 17))
    lost = []

    def start(world_size):
        log = folder / f"start-{len(lost)}"
        processes = ranks.start(training_run.main, str(run.path), world_size=world_size, log=log)
        killed = wait(processes, run, next(kills, math.inf) if run.left_out.exists() else math.inf, log)
        lost.append(max(row["step"] for row in read_jsonl(run.metrics)))
        status = 137 if killed else max(process.exitcode for process in processes)
        return Outcome(status, KILLED if killed else None, stopped=False)

    statuses = [restarts.run_with_restarts(recipe, run, 2, 1, start, lambda: 2)]
    restarts.prepare(recipe, run, 2, restarts.intact_checkpoint(recipe, run))
    statuses.append(restarts.run_with_restarts(recipe, run, 2, 0, start, lambda: 2))
    assert statuses == [137, 0] and len(lost) == 4, "\n".join(read_logs(folder / "start-3"))
    return run, lost


def wait(processes, run, until, log):
    """Wait for ranks, and kill them once a step is logged; return whether that was necessary."""
    deadline = time.monotonic() + 200
    while any(process.is_alive() for process in processes):
        assert time.monotonic() < deadline, "\n".join(read_logs(log))
        if any(row["step"] >= until for row in read_jsonl(run.metrics)):
            time.sleep(0.3)
            for process in reversed(processes):
                os.kill(process.pid, signal.SIGKILL)
            break
        time.sleep(0.02)
    else:
        return False
    for process in processes:
        process.join()
    return True


def test_wandb_has_every_step_once_and_the_reasons(survivor):
    run, lost = survivor
    logged = read_jsonl(run.metrics)
    assert [row["step"] for row in logged] == list(range(1, 41))
    resumed = [row["from_step"] for row in read_jsonl(run.restarts)]
    assert all(step < before for step, before in zip(resumed[1:], lost[1:], strict=False)), "no step was trained twice"
    history = recorded(run, "history")
    assert [row.step.num for row in history] == list(range(1, 41))
    for row, wanted in zip(history, logged, strict=True):
        got = values(row)
        assert float(got["loss"]) == pytest.approx(wanted["loss"], rel=1e-5)
        assert float(got["tokens"]) == wanted["tokens"] and got["by_tokens/loss"] == got["loss"]
    alerts = [(alert.title, alert.text) for alert in recorded(run, "alert")]
    assert [title for title, _ in alerts] == [
        f"the run ended with status {REWIND}",
        f"tiny-3m-full: restarted from step {resumed[1]}",
        "the run ended with status 137",
    ]
    assert "is not finite on rank" in alerts[0][1] and alerts[1][1] == alerts[2][1] == KILLED
    assert [end.exit_code for end in recorded(run, "exit")][-1] == 0
    assert {REWIND, 137} <= {end.exit_code for end in recorded(run, "exit")}
    starts = recorded(run, "run")
    assert {start.run_id for start in starts} == {run.wandb_id.read_text().strip()}
    assert {start.run_group for start in starts} == {"proofs"}
    assert {tuple(start.tags) for start in starts} == {("tiny", "sft", "zero2", "one", "two")}
    assert read_json(run.tracking)["ended"] == 0
    axes = {(metric.name or metric.glob_name): metric.step_metric for metric in recorded(run, "metric")}
    assert axes["by_tokens/*"] == "tokens"


def test_tensorboard_has_every_step_once(survivor):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run, _ = survivor
    events = accumulator.EventAccumulator(str(run.path / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    logged = read_jsonl(run.metrics)
    for key in ("loss", "learning_rate", "tokens"):
        drawn = events.Scalars(key)
        assert [event.step for event in drawn] == list(range(1, 41))
        assert [event.value for event in drawn] == pytest.approx([row[key] for row in logged], rel=1e-5)
    assert [event.step for event in events.Scalars("by_tokens/loss")] == [row["tokens"] for row in logged]
