"""A disk that is full or read-only, or a quota that is used up, is one line with the path, and status 2."""

import errno
import os
import subprocess
import sys

import pytest
import torch
from datasets import Dataset
from safetensors.torch import save_file

from recipes.commands.main import run as run_command
from recipes.spec.errors import cannot_write
from recipes.spec.project import CHECKOUT as ROOT
from recipes.spec.run_folder import RunFolder, append_jsonl, write_json, write_recipe
from recipes.training import run as training_run
from recipes.training.model.draft import TINY_MODEL
from tests.ranks import read_logs
from tests.small import small


def mounted(tmp_path, options, request):
    """Mount a small file system and return its folder."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system takes root")
    request.addfinalizer(lambda: subprocess.run(["umount", "--lazy", str(folder)], check=True))
    return folder


@pytest.fixture
def full(tmp_path, request):
    folder = mounted(tmp_path, "size=1m", request)
    try:
        with (folder / "filler").open("wb") as filler:
            while True:
                filler.write(b"\0" * 4096)
    except OSError:
        return folder


@pytest.fixture
def read_only(tmp_path, request):
    return mounted(tmp_path, "size=1m,ro", request)


ZEROS = torch.zeros(100_000)
WRITES = {
    "json": lambda folder: write_json(folder / "file", {"a": 1}),
    "log": lambda folder: append_jsonl(folder / "file", {"a": 1}),
    "states": lambda folder: torch.save(ZEROS, folder / "file", _use_new_zipfile_serialization=False),
    "zip": lambda folder: torch.save(ZEROS, folder / "file"),
    "weights": lambda folder: save_file({"a": ZEROS}, folder / "file"),
    "dataset": lambda folder: Dataset.from_dict({"a": list(range(100_000))}).save_to_disk(folder / "file"),
}


@pytest.mark.parametrize("name", WRITES)
def test_every_librarys_error_is_understood(full, name):
    with pytest.raises(Exception) as raised:
        WRITES[name](full)
    said = cannot_write(raised.value, full)
    assert said and said.startswith(str(full)) and "the disk is full" in said and "\n" not in said


def test_the_cause_of_an_error_counts():
    for number, word in ((errno.EDQUOT, "quota"), (errno.EROFS, "read-only"), (errno.ENOSPC, "disk is full")):
        try:
            try:
                raise OSError(number, os.strerror(number), "/data/run/file")
            except OSError as error:
                raise RuntimeError("cannot save") from error
        except RuntimeError as error:
            said = cannot_write(error)
        assert said.startswith("/data/run/file: ") and word in said
    assert cannot_write(FileNotFoundError(errno.ENOENT, "no such file", "x")) is None
    assert cannot_write(ValueError("wrong")) is None


def refused(capsys, *words):
    """Return what a command says, which must be one line."""
    assert run_command(words[0], [str(word) for word in words[1:]]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_a_launch_on_a_full_or_read_only_disk(full, capsys):
    assert "the disk is full" in refused(capsys, "launch", "tiny", "full", "--output-dir", full / "run")
    subprocess.run(["mount", "-o", "remount,ro", str(full)], check=True)
    said = refused(capsys, "launch", "tiny", "full", "--output-dir", full / "run")
    assert f"{full}/run" in said and "this disk is read-only" in said


def test_an_export_on_a_full_disk(full, capsys):
    said = refused(capsys, "export", TINY_MODEL, "--output", full / "model")
    assert f"{full}/model" in said and "the disk is full" in said


def test_a_plan_on_a_full_or_read_only_disk(full, capsys):
    words = ["plan", "llama3-8b", "--gpu", "H100", "--gpus", "8", "--write", full / "plan"]
    assert "the disk is full" in refused(capsys, *words)
    subprocess.run(["mount", "-o", "remount,ro", str(full)], check=True)
    assert "this disk is read-only" in refused(capsys, *words)


def test_ranks_whose_disk_fills_up(ranks, tmp_path, request, model_folder, conversations):
    """Between a check of the free space and the write that it was for."""
    run = RunFolder(mounted(tmp_path, "size=400k", request) / "run")
    write_recipe(run, small(model_folder, conversations, max_steps=2))
    assert ranks.run(training_run.main, str(run.path), world_size=1, log=tmp_path / "log") == [2]
    said = read_logs(tmp_path / "log")[0]
    assert "the disk is full; free some space" in said and "Traceback" not in said


def test_the_node_of_a_cluster_says_it_too(read_only):
    options = ["--nodes", "1", "--gpus", "1", "--master-addr", "localhost", "--master-port", "1"]
    command = [sys.executable, "-m", "recipes.launching.node", str(read_only / "run"), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "this disk is read-only" in done.stderr and "Traceback" not in done.stderr
