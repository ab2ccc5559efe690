"""A disk that is too small is detected before training and before each save, without damage to a checkpoint."""

import os
import shutil
import subprocess
import time

import pytest

from deepspeed_recipes.machine.system import GIB, check_disk
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.run_folder import RunFolder, newest_checkpoint, read_jsonl, step_of, write_recipe
from deepspeed_recipes.training import run as training_run
from tests.ranks import read_logs
from tests.small import small

MIB = 2**20


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of 24 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system takes root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder, leave):
    """Write a file that leaves `leave` bytes of the file system free."""
    state = os.statvfs(folder)
    (folder / "filler").write_bytes(b"\0" * (state.f_bavail * state.f_frsize - leave))


@pytest.mark.every
@pytest.mark.parametrize(("save_steps", "free", "what"), [(2, 2 * MIB, "a checkpoint"), (0, MIB // 4, "the export")])
def test_training_does_not_start_without_disk_space(
    ranks, small_disk, tmp_path, model_folder, conversations, save_steps, free, what
):
    run = RunFolder(small_disk / "run")
    write_recipe(run, small(model_folder, conversations, save_steps=save_steps))
    fill(small_disk, free)
    statuses = ranks.run(training_run.main, str(run.path), log=tmp_path / "log")
    assert statuses == [2, 2]
    said, other = read_logs(tmp_path / "log")
    assert f"{what} needs about" in said and "Traceback" not in said + other
    assert not run.metrics.exists() and newest_checkpoint(run) is None


@pytest.mark.every
def test_the_last_checkpoint_survives_a_full_disk(ranks, small_disk, tmp_path, model_folder, conversations):
    run = RunFolder(small_disk / "run")
    write_recipe(run, small(model_folder, conversations, save_steps=5, max_steps=60))
    processes = ranks.start(training_run.main, str(run.path), log=tmp_path / "log")
    deadline = time.monotonic() + 120
    while newest_checkpoint(run) is None:
        assert time.monotonic() < deadline and processes[0].is_alive(), read_logs(tmp_path / "log")
        time.sleep(0.01)
    fill(small_disk, 2 * MIB)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [2, 2], read_logs(tmp_path / "log")
    kept = newest_checkpoint(run)
    assert kept is not None and max(row["step"] for row in read_jsonl(run.metrics)) >= step_of(kept)
    (small_disk / "filler").unlink()
    ranks.check(training_run.main, str(run.path), log=tmp_path / "resumed")
    assert run.summary.exists()


@pytest.mark.every
def test_an_export_without_disk_space_is_made_once_there_is_some(
    ranks, small_disk, tmp_path, model_folder, conversations
):
    """Resuming after the last step needs space for the export, and for no further checkpoint."""
    run, last = RunFolder(small_disk / "run"), small_disk / "run" / "checkpoints" / "checkpoint-3"
    write_recipe(run, small(model_folder, conversations, save_steps=3, max_steps=3))
    ranks.check(training_run.main, str(run.path), log=tmp_path / "log")
    shutil.rmtree(run.export)
    run.summary.unlink()
    written = [(file, file.stat().st_mtime_ns) for file in last.rglob("*")]
    for free, status in ((MIB // 4, 2), (2 * MIB, 0)):
        fill(small_disk, free)
        assert ranks.run(training_run.main, str(run.path), log=tmp_path / f"log{status}") == [status] * 2
        (small_disk / "filler").unlink()
        assert [(file, file.stat().st_mtime_ns) for file in last.rglob("*")] == written
    assert "the export needs about" in read_logs(tmp_path / "log2")[0]
    assert (run.export / "model.safetensors").exists() and run.summary.exists()


def test_the_message_names_what_is_free_and_what_is_needed(tmp_path, monkeypatch):
    check_disk(tmp_path / "not" / "there" / "yet", 1, "a checkpoint")
    with pytest.raises(UserError, match=r"needs about 1048576\.00 GiB, but only .* GiB is free"):
        check_disk(tmp_path, 2**20 * GIB, "a checkpoint")
    usage = shutil.disk_usage(tmp_path)._replace(free=200_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"needs about 5\.00 MiB, but only 0\.19 MiB is free"):
        check_disk(tmp_path, 5 * 2**20, "a checkpoint")
