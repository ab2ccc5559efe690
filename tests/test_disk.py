"""A disk that is full or read-only, or a quota that is used up, is one line with the path, and status 2."""

import errno
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from datasets import Dataset
from safetensors.torch import save_file

from deepspeed_recipes.commands.main import run as run_command
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.errors import cannot_write
from deepspeed_recipes.recipe.run_folder import RunFolder, append_jsonl, write_json, write_recipe
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training.model.draft import TINY_MODEL
from tests import ROOT
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
    large = ValueError("Error while serializing: I/O error: File too large (os error 27)")
    assert cannot_write(large, "export") == (
        "export: cannot be written, files may not be that large here (ulimit -f, or the file system); choose a folder "
        "on another disk."
    )
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
    assert "this disk is read-only; choose a folder on another disk" in refused(capsys, *words)


def test_ranks_whose_disk_fills_up(ranks, tmp_path, request, model_folder, conversations):
    """Between a check of the free space and the write that it was for: the weights fit, the rest of the export not."""
    run = RunFolder(mounted(tmp_path, "size=680k", request) / "run")
    write_recipe(run, small(model_folder, conversations, max_steps=2))
    assert ranks.run(training_run.main, str(run.path), world_size=1, log=tmp_path / "log") == [2]
    said = read_logs(tmp_path / "log")[0]
    assert "the disk is full; free some space" in said and "Traceback" not in said


def test_ranks_whose_folder_is_removed(ranks, tmp_path):
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    assert ranks.run(without_folder, str(run.path), world_size=1, log=tmp_path / "log") == [2]
    said = read_logs(tmp_path / "log")[0]
    assert f"{run.path}: this folder was removed or renamed while" in said and "Traceback" not in said


def without_folder(folder):
    """Lose the run's folder before the first step is recorded; executed on a rank."""

    def execute(recipe, run, trackers):
        shutil.rmtree(folder)
        append_jsonl(run.metrics, {"step": 1})

    training_run.starting_recipe, training_run.execute = lambda run: None, execute
    training_run.main(folder)


def test_the_node_of_a_cluster_says_it_too(read_only):
    options = ["--nodes", "1", "--gpus", "1", "--master-addr", "localhost", "--master-port", "1"]
    command = [sys.executable, "-m", "deepspeed_recipes.launching.node", str(read_only / "run"), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "this disk is read-only" in done.stderr and "Traceback" not in done.stderr


LONG = "a" * 300
REFUSED = {
    "a long name as data": ("launch", "tiny", "full", "--dry-run", f"data.path={LONG}.jsonl"),
    "a long name as a config": ("launch", "tiny", "full", "--dry-run", f"deepspeed={LONG}.json"),
    "a long name as a run": ("report", LONG),
    "a file as a run": ("report", "file"),
    "a file as a folder": ("configs", "copy", "zero3", "file/x"),
    "a file as a run folder": ("launch", "tiny", "full", "--prepare", "--output-dir", "file/x"),
    "a file as a sweep's folder": ("sweep", "tiny", "full", "learning_rate=1e-3,2e-3", "--output-dir", "file/x"),
    "a file as a page": ("launch", "file", "full", "--dry-run"),
    "a folder as a config": ("launch", "tiny", "full", "--dry-run", "deepspeed=folder"),
    "a folder as a report": ("report", "run", "--output", "folder"),
    "links in a circle as data": ("launch", "tiny", "full", "--dry-run", "data.path=circle"),
    "links in a circle as a run folder": ("launch", "tiny", "full", "--prepare", "--output-dir", "circle"),
    "links in a circle as a folder": ("configs", "copy", "zero3", "circle"),
    "a link to nothing as a model": ("launch", "tiny", "full", "--dry-run", "model.path=nothing"),
    "a link to nothing as a run": ("report", "nothing"),
    "a pipe as data": ("launch", "tiny", "full", "--dry-run", "data.path=pipe.jsonl"),
    "a device as data": ("launch", "tiny", "full", "--dry-run", "data.path=/dev/null"),
    "a pipe as a config": ("launch", "tiny", "full", "--dry-run", "deepspeed=pipe.json"),
    "no file system for new folders": ("configs", "copy", "zero3", "/proc/x/y"),
}


@pytest.mark.parametrize("words", REFUSED.values(), ids=REFUSED)
def test_what_is_no_usable_file_is_refused_in_one_line(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    write_recipe(RunFolder(tmp_path / "run"), pages.find("tiny", "full"))
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "nothing").symlink_to("elsewhere")
    os.mkfifo(tmp_path / "pipe.jsonl")
    os.mkfifo(tmp_path / "pipe.json")
    before = sorted(tmp_path.rglob("*"))
    said = refused(capsys, *words)
    assert any(word.partition("=")[2] in said or word in said for word in words[2:] or words[1:])
    assert sorted(tmp_path.rglob("*")) == before


PERMISSIONS = {
    "recipe.json": ("report", "run"),
    "metrics.jsonl": ("report", "run"),
    "data.jsonl": ("launch", "tiny", "full", "--dry-run", "data.path=data.jsonl"),
    "data": ("launch", "tiny", "full", "--dry-run", "data.path=data"),
    "page.py": ("launch", "./page.py", "full", "--dry-run"),
    "model": ("launch", "tiny", "full", "--dry-run", "model.path=model"),
    "config.json": ("launch", "tiny", "full", "--dry-run", "model.path=model"),
    "deepspeed.json": ("launch", "tiny", "full", "--dry-run", "deepspeed=deepspeed.json"),
    "hosts": ("launch", "tiny", "full", "--dry-run", "--hostfile", "hosts"),
    "old.yaml": ("launch", "--from", "old.yaml"),
}
UNPRIVILEGED = """
import contextlib, io, json, os, sys
from deepspeed_recipes.commands.main import run
found = {}
for name, (place, words) in json.loads(sys.argv[1]).items():
    mode = os.stat(place).st_mode
    os.chmod(place, 0)
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
        try:
            found[name] = run(words[0], words[1:]), said.getvalue()
        except BaseException as error:
            found[name] = type(error).__name__, str(error)
    os.chmod(place, mode)
print(json.dumps(found))
"""


def test_files_that_may_not_be_read(tmp_path):
    run = RunFolder(tmp_path / "run")
    write_recipe(run, pages.find("tiny", "full"))
    append_jsonl(run.metrics, {"step": 1})
    for folder in ("data", "model"):
        (tmp_path / folder).mkdir()
    for name in ("data/a.jsonl", "data.jsonl", "page.py", "deepspeed.json", "hosts", "old.yaml"):
        (tmp_path / name).write_text("{}")
    shutil.copy(TINY_MODEL / "config.json", tmp_path / "model")
    places = {"recipe.json": run.recipe, "metrics.jsonl": run.metrics, "config.json": tmp_path / "model/config.json"}
    order = {name: (str(places.get(name, tmp_path / name)), words) for name, words in PERMISSIONS.items()}
    command = [sys.executable, "-c", UNPRIVILEGED, json.dumps(order)]
    if os.geteuid() == 0:  # who may read everything
        rights = "-dac_override,-dac_read_search"
        command = ["setpriv", f"--bounding-set={rights}", f"--inh-caps={rights}", *command]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == set(PERMISSIONS)
    for name, (status, said) in found.items():
        assert status == 2 and "Permission denied" in said and name in said and said.count("\n") == 1, (name, said)
