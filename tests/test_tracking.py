"""What trackers have of a run, read back from their own files: every step once, and why it ended."""

import importlib.util
import math
import os
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from deepspeed_recipes.launching import restarts
from deepspeed_recipes.launching.supervise import Outcome
from deepspeed_recipes.recipe import overrides, pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.recipe import Wandb
from deepspeed_recipes.recipe.run_folder import (
    REWIND,
    RunFolder,
    append_jsonl,
    forget_after,
    read_json,
    read_jsonl,
    write_json,
    write_recipe,
)
from deepspeed_recipes.report.write import page as report_page
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training.tracking import trackers, weights_and_biases, writer
from deepspeed_recipes.training.tracking.trackers import Trackers
from deepspeed_recipes.training.tracking.writer import opened
from tests.nan_data import write_nan_data, write_nan_model
from tests.ranks import read_logs
from tests.small import small
from tests.tiers import tiered
from tests.workers import system_log

KILLED = "rank 1 on this host was killed by SIGKILL"
BAD = 5
"""The number of the example with the NaN."""


def recorded(run, kind):
    """Return the W&B records of one kind in all parts of a run, in the order of the parts."""
    files = sorted((run.path / "wandb").glob("offline-run-*/*.wandb"))
    found = [record for file in files for record in weights_and_biases.records(file)]
    return [getattr(record, kind) for record in found if record.HasField(kind)]


def values(history):
    """Return a W&B history record as numbers by key."""
    return {item.key or "/".join(item.nested_key): item.value_json for item in history.item}


@pytest.fixture(scope="module")
def survivor(ranks, tmp_path_factory, model_folder, conversations):
    """Train a run that rewinds, is killed, is killed again after its restart, and is resumed to its end by hand."""
    folder = tmp_path_factory.mktemp("survivor")
    data = write_nan_data(conversations, folder / "rows.jsonl", BAD)
    recipe = small(write_nan_model(model_folder, folder / "model"), data, "zero2.json", save_steps=1, on_nan="rewind")
    recipe = replace(recipe, max_steps=40, global_batch_size=2, micro_batch_size=1, learning_rate=1e-4)
    recipe = replace(recipe, tracking="wandb,tensorboard", wandb=Wandb("offline", group="proofs", tags="one,two"))
    run = RunFolder(folder / "run")
    kills = iter((9, 17))
    lost = []

    def start(world_size):
        write_recipe(run, replace(recipe, save_steps=4 if run.left_out.exists() else 1))
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
            for process in processes:
                os.kill(process.pid, signal.SIGSTOP)  # at a step that no checkpoint has yet
            time.sleep(16)  # W&B's own process writes what it was sent, every so many seconds
            for process in reversed(processes):
                os.kill(process.pid, signal.SIGKILL)
            break
        time.sleep(0.02)
    else:
        return False
    for process in processes:
        process.join()
    return True


@pytest.mark.every
def test_trackers_get_what_the_other_nodes_do(ranks, tmp_path, model_folder, conversations):
    run = RunFolder(tmp_path / "run")
    recipe = small(model_folder, conversations, "zero2.json", max_steps=40, wandb=Wandb("offline"))
    write_recipe(run, recipe)
    ranks.check(system_log.on_two_nodes, str(run.path), log=tmp_path / "log")
    names = {name for row in recorded(run, "history") for name in values(row) if name.startswith("nodes/")}
    assert {"nodes/node-1/cpu_utilization", "nodes/node-1/rank-1/gpu_utilization"} < names
    assert not any(name.startswith("nodes/node-0") for name in names), "W&B samples that one"
    load = [
        float(found["nodes/node-1/rank-1/gpu_utilization"])
        for found in map(values, recorded(run, "history"))
        if found.keys() & names
    ]
    assert set(load) == {91}


def test_half_a_sample_of_another_node_is_left_out(tmp_path):
    run = RunFolder(tmp_path)
    run.ranks.mkdir()
    for rank, node in ((1, socket.gethostname()), (8, "worker-1"), (9, "worker-1")):
        append_jsonl(run.system_of(rank), {"time": 1.0, "node": node, "rank": rank, "step": 3, "gpu_power_watts": rank})
    with run.system_of(9).open("a") as file:
        file.write('{"time": 2.0, "no')
    wanted = {f"nodes/worker-1/rank-{rank}/gpu_power_watts": rank for rank in (8, 9)}
    assert trackers.other_nodes(run) == wanted
    with run.system_of(9).open("a") as file:
        file.write("x" * trackers.TAIL)
    assert trackers.other_nodes(run).keys() == {"nodes/worker-1/rank-8/gpu_power_watts"}


@pytest.mark.every
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
    assert {frozenset(start.tags) for start in starts} == {frozenset(("tiny", "sft", "zero2", "one", "two"))}
    assert read_json(run.tracking)["ended"] == 0
    axes = {(metric.name or metric.glob_name): metric.step_metric for metric in recorded(run, "metric")}
    assert axes["by_tokens/*"] == "tokens"


@pytest.mark.every
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


def metrics(step, **more):
    """Return one line of metrics.jsonl."""
    return {"step": step, "loss": 1 / step, "learning_rate": 1e-4, "grad_norm": None, "tokens": 10 * step, **more}


def follow(run, recipe, first, last, trackers=None):
    """Log steps as a run does, in trackers that are started for it."""
    trackers = trackers or Trackers(run)
    trackers.begin(recipe, {"zero_optimization": {"stage": 2}})
    for step in range(first, last + 1):
        append_jsonl(run.metrics, metrics(step))
        trackers.record(metrics(step))
        if step % 2 == 0:
            append_jsonl(run.evaluations, {"step": step, "loss": 2 / step})
            trackers.record({"step": step, "held_out/loss": 2 / step})
    return trackers


def in_tensorboard(run, recipe):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.path / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    drawn = {key: [(event.step, event.value) for event in events.Scalars(key)] for key in ("loss", "held_out/loss")}
    texts = {tag: events.Tensors(f"{tag}/text_summary")[-1] for tag in ("alert", "answers", "recipe")}
    said = {tag: event.tensor_proto.string_val[0].decode() for tag, event in texts.items()}
    assert '"family": "tiny"' in said["recipe"]
    return drawn, said["alert"], said["answers"]


def in_mlflow(run, recipe):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run.path}/mlflow.db")
    experiment = client.get_experiment_by_name(recipe.wandb.project).experiment_id
    (found,) = client.search_runs([experiment])
    assert found.info.status == "FINISHED" and found.data.params["wandb.group"] == "proofs"
    history = {key: client.get_metric_history(found.info.run_id, key) for key in ("loss", "held_out/loss")}
    drawn = {key: sorted((metric.step, metric.value) for metric in rows) for key, rows in history.items()}
    table = client.download_artifacts(found.info.run_id, "answers.json", str(run.path))
    return drawn, found.data.tags["alert"], str(read_json(Path(table))["data"])


def in_trackio(run, recipe):
    from trackio.sqlite_storage import SQLiteStorage

    project = recipe.wandb.project
    (name,) = SQLiteStorage.get_runs(project)
    rows = SQLiteStorage.get_logs(project, name)
    drawn = {key: [(row["step"], row[key]) for row in rows if key in row] for key in ("loss", "held_out/loss")}
    alerts = "".join(f"{alert['title']} {alert['text']}" for alert in SQLiteStorage.get_alerts(project, name))
    return drawn, alerts, str([row["answers"] for row in rows if "answers" in row])


OTHERS = {"tensorboard": in_tensorboard, "mlflow": in_mlflow, "trackio": in_trackio}


@pytest.mark.parametrize("name", tiered(OTHERS, {"tensorboard", "trackio"}))
def test_other_trackers_have_every_step_once_and_the_reason(alone, tmp_path, monkeypatch, capfd, name):
    """A start that is lost after step 7, and one that resumes after step 4; read with the tracker's own library."""
    pytest.importorskip(name)
    if name == "trackio":  # it reads the variable when it is imported
        monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
        monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio")
    run = RunFolder(tmp_path / "run")
    page = pages.find("tiny", "full")
    recipe = replace(page, tracking=name, wandb=Wandb(project="checks", group="proofs", examples=True))
    write_recipe(run, recipe)
    for step, answer in ((0, "no | idea"), (9, "four")):
        row = {"step": step, "prompt": "2 + 2?", "expected": "four", "answer": answer}
        append_jsonl(run.answers, row)
    write_json(run.checkpoints / "checkpoint-4" / "complete.json", {})
    follow(run, recipe, 1, 7)
    time.sleep(1)
    forget_after(run, run.checkpoints / "checkpoint-4")
    append_jsonl(run.restarts, {"time": time.time(), "cause": KILLED, "from_step": 4, "ranks": 2})
    append_jsonl(run.answers, row)
    trackers = follow(run, recipe, 5, 9)
    (line,) = trackers.end({"loss": 0.1})
    assert line.split()[0].lower() == name
    time.sleep(1)
    drawn, alert, table = OTHERS[name](run, recipe)
    assert drawn["loss"] == [(step, pytest.approx(1 / step)) for step in range(1, 10)]
    assert drawn["held_out/loss"] == [(step, pytest.approx(2 / step)) for step in range(2, 10, 2)]
    assert "restarted from step 4" in alert and KILLED in alert
    assert "2 + 2?" in table and "four" in table and "idea" in table


def test_what_a_tracker_has_missed_is_sent_when_the_run_resumes(alone, tmp_path):
    """A killed process loses what its tracker has not written: here everything after step 2."""
    pytest.importorskip("tensorboard")
    run, recipe = RunFolder(tmp_path / "run"), replace(pages.find("tiny", "full"), tracking="tensorboard")
    write_recipe(run, recipe)
    follow(run, recipe, 1, 2)
    for step in (3, 4):
        append_jsonl(run.metrics, metrics(step))
    follow(run, recipe, 5, 6).end({})
    events = in_tensorboard_scalars(run)
    assert [event.step for event in events] == [1, 2, 3, 4, 5, 6]


def in_tensorboard_scalars(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(run.path / "tensorboard"), size_guidance={"scalars": 0}).Reload().Scalars("loss")


def test_a_tracker_that_fails_does_not_end_the_run(alone, tmp_path, capsys):
    """A file is where its folder should be."""
    pytest.importorskip("tensorboard")
    run, recipe = RunFolder(tmp_path / "run"), replace(pages.find("tiny", "full"), tracking="tensorboard")
    write_recipe(run, recipe)
    (run.path / "tensorboard").write_text("in the way")
    trackers = follow(run, recipe, 1, 3)
    assert trackers.end({}) == [] and not trackers.writers
    said = capsys.readouterr().out
    assert said.count("tracking=tensorboard is off from here, training continues: ") == 1


@pytest.mark.every
def test_offline_records_survive_blocks_and_a_cut(tmp_path):
    """The format's framing: records across blocks of 32 KiB, and a last one that is cut off."""
    import wandb

    run = wandb.init(mode="offline", id="blocks", dir=tmp_path, settings=wandb.Settings(silent=True))
    for step in range(1, 40):
        run.log({"text": "x" * 3000, "loss": 1 / step}, step=step)
    folder = tmp_path / "wandb"
    assert weights_and_biases.is_written(folder) and not weights_and_biases.is_written(tmp_path / "other")
    run.finish(exit_code=3)
    wandb.teardown()
    assert not weights_and_biases.is_written(folder)
    (file,) = folder.glob("offline-run-*/*.wandb")
    assert file.stat().st_size > 2 * weights_and_biases.BLOCK
    found = list(weights_and_biases.records(file))
    assert [one.history.step.num for one in found if one.HasField("history")] == list(range(1, 40))
    assert found[-1].exit.exit_code == 3 and weights_and_biases.last_step(folder, "blocks") == 39
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert 10 < weights_and_biases.last_step(folder, "blocks") < 39
    assert weights_and_biases.last_step(folder, "other") == -1


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("tracking=tensorbord", "tracking=tensorbord: no such tracker. Did you mean tensorboard?"),
        ("tracking=wandb,wandb", "wandb is named twice"),
        ("tracking=neptune", "no such tracker. Choose from wandb, tensorboard, mlflow, trackio, or none"),
    ],
)
def test_unknown_trackers_are_refused(refusal, word, said):
    error = refusal("launch", "tiny", "full", word, "--dry-run")
    assert said in error and error.count("\n") == 1


def test_a_tracker_that_is_not_installed_is_refused_with_the_line_that_installs_it(refusal, tmp_path, monkeypatch):
    missing = "mlflow"
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else found(name))
    words = ["tiny", "full", f"tracking=wandb,{missing}", "--output-dir", str(tmp_path / "run")]
    error = refusal("launch", *words)
    assert f"tracking={missing}: {missing} is not installed; pip install {missing}, or leave it out" in error
    assert error.count("\n") == 1 and not (tmp_path / "run").exists()


def test_which_trackers_a_recipe_has():
    full = pages.find("tiny", "full")
    assert full.trackers == ["wandb"]
    assert overrides.apply(full, ["wandb.mode=disabled"]).trackers == []
    assert overrides.apply(full, ["tracking=none"]).trackers == []
    both = overrides.apply(full, ["tracking=tensorboard,wandb", "wandb.mode=disabled"])
    assert both.trackers == ["tensorboard"]
    with pytest.raises(UserError, match="'tracking'"):
        overrides.apply(full, ["report_to=wandb"])


def lost(action):
    """Do something in a process that is killed before it can say that it ends."""
    child = os.fork()
    if not child:
        try:
            action()
            time.sleep(1)  # W&B's own process writes what it was sent
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.every
def test_wandb_has_what_killed_and_failed_processes_have_logged_once(alone, tmp_path):
    """Killed after step 7, rewound from step 9, and resumed: the last step before a kill was not written, and is sent.

    The record of a whole run, with engines and the launcher, is `test_wandb_has_every_step_once_and_the_reasons`.
    """
    run, recipe = RunFolder(tmp_path / "run"), pages.find("tiny", "full")
    recipe = replace(recipe, wandb=Wandb("offline", job_type="proof", examples=True))
    write_recipe(run, recipe)
    write_json(run.checkpoints / "checkpoint-6" / "complete.json", {})
    lost(lambda: follow(run, recipe, 1, 7))
    last = weights_and_biases.last_step(run.path / "wandb", run.wandb_id.read_text().strip())
    written = [row.step.num for row in recorded(run, "history")]
    assert written == list(range(1, last + 1)) and last < 7, "W&B writes a step when the next begins"
    forget_after(run, run.checkpoints / "checkpoint-6")
    time.sleep(1.1)  # W&B names a folder by the second
    lost(lambda: follow(run, recipe, 7, 9).failed("step 10: the loss is not finite", REWIND))
    assert read_json(run.tracking)["ended"] == REWIND
    forget_after(run, run.checkpoints / "checkpoint-6")
    time.sleep(1.1)
    for step, answer in ((0, "no idea"), (12, "four")):
        append_jsonl(run.answers, {"step": step, "prompt": "2 + 2?", "expected": "four", "answer": answer})
    (line,) = follow(run, recipe, 7, 12).end({"loss": 0.5})
    assert "wandb sync" in line and line.endswith(f"/offline-run-*-{run.wandb_id.read_text().strip()}")
    history = recorded(run, "history")
    assert [row.step.num for row in history] == list(range(1, 13))
    for row in history:
        step, got = row.step.num, values(row)
        assert float(got["loss"]) == pytest.approx(1 / step) and got["by_tokens/loss"] == got["loss"]
        assert ("held_out/loss" in got) == (step % 2 == 0) and float(got["tokens"]) == 10 * step
    (file,) = (run.path / "wandb").glob("offline-run-*/files/media/table/answers*.json")
    table = {"columns": ["prompt", "expected", "before", "after"], "data": [["2 + 2?", "four", "no idea", "four"]]}
    assert read_json(file).items() >= table.items()
    (alert,) = recorded(run, "alert")
    assert alert.title == f"the run ended with status {REWIND}" and alert.text == "step 10: the loss is not finite"
    assert [end.exit_code for end in recorded(run, "exit")] == [REWIND, 0]


def test_the_launcher_tells_wandb_why_a_run_ended_and_adds_the_artifacts(alone, tmp_path):
    """What a rank that was killed could not tell, and what is there only after the ranks."""
    run, recipe = RunFolder(tmp_path / "run"), pages.find("tiny", "full")
    recipe = replace(recipe, wandb=Wandb("offline", artifacts=True))
    write_recipe(run, recipe)
    write_json(run.deepspeed, {})
    lost(lambda: follow(run, recipe, 1, 3))
    time.sleep(1.1)
    writer.failed(run, KILLED, 137)
    writer.failed(run, KILLED, 137)  # told already
    ((title, text),) = [(alert.title, alert.text) for alert in recorded(run, "alert")]
    assert title == "the run ended with status 137" and text == KILLED
    assert [end.exit_code for end in recorded(run, "exit")] == [137]
    writer.upload(run)
    assert not recorded(run, "artifact"), "it has not finished"
    both = {"predicted": {"tokens_per_second": 1200.0}, "measured": {"tokens_per_second": 1000.0}}
    write_json(run.summary, {"stopped": False} | both)

    write_json(run.export / "config.json", {"model_type": "tiny"})
    for step, answer in ((0, "no idea"), (3, "four")):
        append_jsonl(run.answers, {"step": step, "prompt": "2 + 2?", "expected": "four", "answer": answer})
    report_page(run)
    assert "2 + 2?" in run.report_page.read_text()
    time.sleep(1.1)
    writer.upload(run)
    assert sorted(one.type for one in recorded(run, "artifact")) == ["model", "report"]
    entries = [entry for one in recorded(run, "artifact") for entry in one.manifest.contents]
    assert {entry.path for entry in entries} == {"config.json", "report.html"}
    sent = " ".join(str(one) for one in recorded(run, "summary"))
    assert all(word in sent for word in ("1200.0", "1000.0"))
    (sent,) = [Path(entry.local_path).read_text() for entry in entries if entry.path == "report.html"]
    assert "loss" in sent and "2 + 2?" not in sent, "wandb.examples is not set"


@pytest.mark.every
def test_wandb_is_offline_where_it_cannot_be_reached(tmp_path, monkeypatch):
    """With a key, and nobody listening: the run is recorded on the disk, and can be synced later."""
    for name, value in (("BASE_URL", "http://127.0.0.1:9"), ("API_KEY", "0" * 40), ("INIT_TIMEOUT", "5")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    run = RunFolder(tmp_path / "run")
    write_recipe(run, pages.find("tiny", "full"))
    tracked = opened("wandb", pages.find("tiny", "full"), run, {})
    tracked.record(1, {"loss": 1.0})
    assert not tracked.online and "wandb sync" in tracked.finish({}, 0)
    assert [row.step.num for row in recorded(run, "history")] == [1]
