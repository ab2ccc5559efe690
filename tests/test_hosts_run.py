"""Runs over ssh on two real hosts: undisturbed, stopped, with a failing or hanging rank, with a lost host."""

import contextlib
import signal
import subprocess
import sys
import time
from functools import partial
from importlib import metadata
from pathlib import Path

import psutil
import pytest

from deepspeed_recipes.launching.ranks import SILENCE
from deepspeed_recipes.planning.hardware import machine_file
from deepspeed_recipes.recipe.run_folder import RunFolder, newest_checkpoint, read_json, read_jsonl, write_recipe
from deepspeed_recipes.training import run as training_run
from tests import ROOT, test_launch
from tests.launching import LAUNCH
from tests.network_hosts import Hosts, without_hosts
from tests.small import small
from tests.test_launch import processes_of, ranks_of

wait_for_step = partial(test_launch.wait_for_step, seconds=240)
wait_until = partial(test_launch.wait_until, seconds=240)

HERE = pytest.mark.skipif(bool(without_hosts()), reason=without_hosts() or "two hosts can run here")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with Hosts(tmp_path_factory.mktemp("machines") / "two") as started:
        yield started


@pytest.fixture
def shared(tmp_path):
    """Return a folder that a host can be made to lack, with the run's folder in it."""
    (tmp_path / "shared").mkdir()
    return RunFolder(tmp_path / "shared" / "run")


def launch(hosts, run, *arguments, **options):
    command = [*LAUNCH, "tiny", "full", "--output-dir", str(run.path), *map(str, arguments)]
    return subprocess.Popen(
        command, env=hosts.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )


def ended(process, status=0):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == status, output
    return output


def overrides(recipe, **changes):
    """Return the recipe of `tests.small` as words of the command line."""
    fixed = {"precision": "fp32", "packing": "false", "logging_steps": 1, "wandb.mode": "disabled"}
    fixed |= {"data.validation": "none", "data.metric": "loss", "gradient_checkpointing": "false"}
    fixed |= {"model.path": recipe.model.path, "data.path": recipe.data.path, "deepspeed": recipe.deepspeed}
    fixed |= {name: getattr(recipe, name) for name in ("learning_rate", "weight_decay", "max_steps", "save_steps")}
    fixed |= {name: getattr(recipe, name) for name in ("global_batch_size", "micro_batch_size", "sequence_length")}
    fixed |= {"schedule.kind": recipe.schedule.kind, "schedule.warmup": recipe.schedule.warmup}
    return [f"{name}={value}" for name, value in (fixed | changes).items()]


@HERE
@pytest.mark.every
def test_two_hosts_train_what_two_ranks_on_one_host_train(hosts, shared, ranks, model_folder, conversations, tmp_path):
    recipe = small(model_folder, conversations, "zero3.json")
    one = RunFolder(tmp_path / "one")
    write_recipe(one, recipe)
    ranks.check(training_run.main, str(one.path), log=tmp_path / "log")
    output = ended(launch(hosts, shared, "--hostfile", hosts.hostfile(), *overrides(recipe)))
    rows = [line for line in output.splitlines() if line.endswith("  shared")]
    assert len(rows) == 2 and all("in sync" in row and "eth0" in row for row in rows), output
    ours, theirs = ([(row["loss"], row["grad_norm"]) for row in read_jsonl(run.metrics)] for run in (shared, one))
    assert len(ours) == recipe.max_steps and ours == theirs
    assert read_json(shared.environment)["world_size"] == 2
    assert f"'{hosts.addresses[1]}': [0]" in output  # DeepSpeed's own words: the second rank was there


@pytest.mark.every
@HERE
def test_a_host_that_cannot_take_part_is_named_and_nothing_starts(hosts, shared, tmp_path):
    dead = f"{hosts.network}.9"
    output = ended(launch(hosts, shared, "--hostfile", hosts.hostfile(hosts=[hosts.addresses[0], dead])), 2)
    assert f"{dead}: not reachable" in output and not shared.path.exists()

    name = metadata.distribution("deepspeed").locate_file("deepspeed-0.19.8.dist-info/METADATA")
    other = tmp_path / "METADATA"
    other.write_text(Path(name).read_text().replace("Version: 0.19.8", "Version: 0.18.0", 1))
    changed = tmp_path / "tiny.py"
    changed.write_text((ROOT / "recipes" / "tiny.py").read_text() + "\n")
    for before, hint in (
        (f"mount --bind {other} {name}", "deepspeed 0.18.0"),
        (f"mount --bind {changed} {ROOT}/recipes/tiny.py", "git pull"),
        (f"mount -t tmpfs none {shared.path.parent}", "is a different folder there"),
        (f"mount -t tmpfs none {ROOT}", "the project must be at the same path"),
    ):
        hosts.change(1, before)
        output = ended(launch(hosts, shared, "--hostfile", hosts.hostfile()), 2)
        assert f"launch.py: {hosts.addresses[1]}: " in output and hint in output, output
        assert not shared.path.exists() and not list(shared.path.parent.iterdir()) and not processes_of(shared)
    hosts.change(1, "true")


@HERE
@pytest.mark.every
def test_doctor_measures_the_network_between_hosts(hosts, tmp_path):
    """A host can send 500 Mbit/s, which is 0.0625 GB/s."""
    hosts.throttle("500mbit")
    file = tmp_path / "machine.json"
    words = ["--measure", file, "--gpus", "1", "--hostfile", hosts.hostfile(), "--output-dir", tmp_path / "shared"]
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "doctor.py", *map(str, words)],
        env=hosts.environment(), capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    hosts.unthrottle()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all-reduce over 2 hosts, 2 ranks" in done.stdout
    assert 0.03 < machine_file.read(file).network_gbs < 0.066
    assert not list((tmp_path / "shared").iterdir())


@HERE
@pytest.mark.every
def test_ctrl_c_writes_a_checkpoint_on_two_hosts_and_a_dead_rank_ends_both(hosts, shared, model_folder, conversations):
    words = overrides(small(model_folder, conversations, "zero3.json", max_steps=400, save_steps=5))
    process = launch(hosts, shared, "--hostfile", hosts.hostfile(), *words)
    wait_for_step(process, shared, 6)
    process.send_signal(signal.SIGINT)
    output = ended(process, 130)
    stopped = read_json(shared.summary)
    assert stopped["stopped"] and newest_checkpoint(shared).name == f"checkpoint-{stopped['steps']}", output
    assert not processes_of(shared)
    process = launch(hosts, shared, "--resume", "--hostfile", hosts.hostfile())
    wait_for_step(process, shared, stopped["steps"] + 2)
    rank_of(shared, 0).kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode not in (0, 2) and not processes_of(shared)
    assert f"rank 0 on {hosts.addresses[0]} was killed by SIGKILL; the last lines of its log:\n  | " in output


LONG = {"max_steps": 60, "save_steps": 10, "epochs": 99, "learning_rate": 1e-4}
"""Changes of the recipe for a run in which something happens at step 35."""


@pytest.fixture(scope="module")
def undisturbed(ranks, tmp_path_factory, model_folder, conversations):
    """Return the last loss of the long run on two ranks of one host."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run = RunFolder(folder / "run")
    write_recipe(run, small(model_folder, conversations, "zero3.json", **LONG))
    ranks.check(training_run.main, str(run.path), log=folder / "log")
    return read_jsonl(run.metrics)[-1]["loss"]


@HERE
@pytest.mark.every
def test_a_lost_host_is_named_and_training_resumes_on_the_others(
    hosts, shared, model_folder, conversations, undisturbed
):
    words = overrides(small(model_folder, conversations, "zero3.json", **LONG), epochs=99)
    process = launch(hosts, shared, "--hostfile", hosts.hostfile(), "--max-restarts", 1, *words)
    with mended(hosts, process):
        wait_for_step(process, shared, 35)
        other = rank_of(shared, 0)
        hosts.cut(1)
        assert psutil.wait_procs([other], timeout=30)[0]
        output = ended(process)
    lost = hosts.addresses[1]
    (restart,) = read_jsonl(shared.restarts)
    assert restart["cause"].startswith(f"{lost} stopped answering") and restart["cause"] in output
    assert restart["ranks"] == 1 and restart["from_step"] >= 30 and f"continuing without {lost}" in output
    ends_as(undisturbed, shared)
    wait_until_gone(shared, SILENCE + 10)


@HERE
@pytest.mark.every
def test_a_host_that_is_back_joins_the_next_restart(hosts, shared, model_folder, conversations, undisturbed):
    """It is the first one, the rendezvous of all ranks: meanwhile they use the other, whatever was asked for."""
    words = overrides(small(model_folder, conversations, "zero3.json", **LONG), epochs=99)
    master = ["--master-addr", hosts.addresses[0]]
    process = launch(hosts, shared, "--hostfile", hosts.hostfile(), "--max-restarts", 2, *master, *words)
    with mended(hosts, process):
        wait_for_step(process, shared, 15)
        other = rank_of(shared, 1)
        hosts.switch_off(0)
        assert psutil.wait_procs([other], timeout=30)[0]
        wait_until(process, shared.restarts.exists)
        hosts.mend()
        wait_until(process, lambda: ranks_of(shared))
        wait_for_step(process, shared, 35)
        rank_of(shared, 0).kill()
        output = ended(process)
    first, second = read_jsonl(shared.restarts)
    assert (first["ranks"], second["ranks"]) == (1, 2), output
    assert second["cause"].startswith(f"rank 0 on {hosts.addresses[1]} was killed by SIGKILL"), second
    ends_as(undisturbed, shared)
    assert not processes_of(shared)


@HERE
@pytest.mark.every
def test_a_stopped_rank_ends_both_hosts_and_without_a_host_nothing_restarts(
    hosts, shared, model_folder, conversations, tmp_path
):
    long = {**LONG, "max_steps": 2000, "hang_minutes": 0.3}
    words = overrides(small(model_folder, conversations, "zero3.json", **long), epochs=9999, hang_minutes=0.3)
    process = launch(hosts, shared, "--hostfile", hosts.hostfile(), *words)
    with mended(hosts, process):
        wait_for_step(process, shared, 15)
        rank_of(shared, 1).suspend()
        output, _ = process.communicate(timeout=0.3 * 60 + 30)
        assert process.returncode not in (0, 2) and not processes_of(shared)
        assert (
            "no step finished for 0.3 minutes" in output and "none from rank 1, which was stopped or cut off" in output
        ), output
        process = launch(hosts, shared, "--resume", "--hostfile", hosts.hostfile(), "--max-restarts", 1)
        wait_until(process, lambda: len(ranks_of(shared)) == 2)
        for index in range(2):
            hosts.switch_off(index)
        assert f"cannot restart: {', '.join(hosts.addresses)} do not answer." in ended(process, 2)
    assert not processes_of(shared)


@HERE
@pytest.mark.every
def test_ranks_do_not_outlive_a_launcher_that_is_killed(hosts, shared, model_folder, conversations):
    words = overrides(small(model_folder, conversations, "zero3.json", **LONG | {"max_steps": 2000}), epochs=9999)
    process = launch(hosts, shared, "--hostfile", hosts.hostfile(), *words)
    wait_for_step(process, shared, 2)
    process.kill()
    process.wait()
    wait_until_gone(shared, 20)
    process.stdout.close()


@contextlib.contextmanager
def mended(hosts, process):
    """End the launcher and repair the hosts, whatever happens."""
    try:
        yield
    finally:
        process.kill()
        hosts.mend()


def rank_of(run, number):
    return next(rank for rank in ranks_of(run) if rank.environ()["RANK"] == str(number))


def ends_as(undisturbed, run):
    rows = read_jsonl(run.metrics)
    assert [row["step"] for row in rows] == list(range(1, LONG["max_steps"] + 1))
    assert rows[-1]["loss"] == pytest.approx(undisturbed, rel=1e-4)
    assert (run.export / "model.safetensors").exists()


def wait_until_gone(run, seconds):
    """Wait until a host has ended the processes by itself."""
    deadline = time.monotonic() + seconds
    while processes_of(run):
        assert time.monotonic() < deadline, [process.cmdline() for process in processes_of(run)]
        time.sleep(0.5)
