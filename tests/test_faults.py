"""A file system that fails while a run is resumed costs nothing: at each of its calls, once and from then on."""

import builtins
import contextlib
import errno
import io
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepspeed_recipes.commands.sweep import trials
from deepspeed_recipes.launching import paths, restarts
from deepspeed_recipes.launching.supervise import Outcome
from deepspeed_recipes.machine import run_lock
from deepspeed_recipes.recipe import pages, run_folder
from deepspeed_recipes.recipe.errors import FileUnusable, UserError
from deepspeed_recipes.recipe.run_folder import (
    COMPLETE,
    REWIND,
    RunFolder,
    newest_checkpoint,
    read_jsonl,
    read_recipe,
    sizes,
    write_json,
    write_jsonl,
    write_recipe,
)
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training import without_launcher
from deepspeed_recipes.training.checkpoint import digests
from deepspeed_recipes.training.checkpoint.save import Checkpoints
from deepspeed_recipes.training.tracking.trackers import Trackers

CALLS = (
    "stat",
    "lstat",
    "open",
    "listdir",
    "scandir",
    "unlink",
    "remove",
    "rename",
    "replace",
    "rmdir",
    "mkdir",
    "link",
)
"""The system calls, in Python's `os`, that can fail; `open` of files and their reads are added."""
NUMBERS = (errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES)
FILES = ("model.safetensors", "global_step/states.pt")


class Faults:
    """Counts a folder's system calls, and lets those fail that a test asks for."""

    def __init__(self, monkeypatch, folder):
        self.folder, self.count, self.fails = str(folder), 0, lambda at: False
        self.number = errno.EIO
        for name in CALLS:
            monkeypatch.setattr(os, name, self.wrapped(getattr(os, name)))
        opened, faults = io.open, self

        def open_file(file, *arguments, **options):
            faults.count_one(file)
            found = opened(file, *arguments, **options)
            return Reading(found, faults, file) if isinstance(found, io.FileIO) else found

        for module in (io, builtins):
            monkeypatch.setattr(module, "open", open_file)

    def wrapped(self, call):
        def called(path=".", *arguments, **options):
            # Relative to an open folder: `shutil.rmtree` does that, inside the run only.
            inside = any(value is not None for name, value in options.items() if name.endswith("dir_fd"))
            self.count_one(self.folder if inside else path)
            return call(path, *arguments, **options)

        return called

    def count_one(self, path):
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self.folder):
            self.count += 1
            if self.fails(self.count):
                raise OSError(self.number, os.strerror(self.number), os.fspath(path))

    def begin(self, number=errno.EIO, fails=lambda at: False):
        self.count, self.number, self.fails = 0, number, fails

    def end(self):
        self.fails = lambda at: False
        return self.count


class Reading:
    """An open file whose reads can fail, without a name in the error, as the system's are."""

    def __init__(self, file, faults, path):
        self.file, self.faults, self.path = file, faults, path

    def readinto(self, block):
        try:
            self.faults.count_one(self.path)
        except OSError as error:
            raise OSError(error.errno, error.strerror) from None
        return self.file.readinto(block)

    def readable(self):
        return True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Write a run with two complete checkpoints, an unfinished one, and a copy that the user has made."""
    run = RunFolder(tmp_path_factory.mktemp("original") / "run")
    write_recipe(run, paths.locate(replace(pages.find("tiny", "full"), save_steps=3)))
    write_json(run.deepspeed, {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
    for step in (3, 6, 9):
        folder = run.checkpoints / f"checkpoint-{step}"
        (folder / "global_step").mkdir(parents=True)
        for name in FILES:
            (folder / name).write_bytes(bytes([step]) * 100)
        if step < 9:
            found = {name: digests.of_file(folder / name) for name in FILES}
            complete = {"step": step, "world_size": 2, "layout": {}, "files": sizes(folder), "digests": found}
            write_json(folder / COMPLETE, complete)
    shutil.copytree(run.checkpoints / "checkpoint-3", run.checkpoints / "checkpoint-3-backup")
    write_jsonl(run.metrics, [{"step": step, "loss": 1.0} for step in range(1, 11)])
    write_jsonl(run.evaluations, [{"step": 0, "loss": 2.0}])
    write_json(run.summary, {"stopped": True})
    return run


def launched(run):
    """Do what ds-recipes launch --resume does before it starts ranks."""
    recipe = run_folder.to_resume(pages.find("tiny", "full"), run.path) and run_folder.read_recipe(run)
    run_lock.check(run.path)
    with run_lock.hold(run.path):
        restarts.prepare(recipe, run, 2, restarts.intact_checkpoint(recipe, run))


def restarted(run):
    """Do what the launcher does between two attempts, here and on Ray."""
    outcomes = iter([Outcome(REWIND, None, False), Outcome(0, None, False)])
    status = restarts.run_with_restarts(run_folder.read_recipe(run), run, 2, 1, lambda _: next(outcomes), lambda: 2)
    assert status == 143  # the run has not finished


def by_torchrun(run):
    """Do what rank 0 does first under torchrun and mpirun, and the first node under SLURM and Kubernetes."""
    assert not run_folder.is_finished(run)
    with run_lock.hold(run.path):
        without_launcher.prepare(run, 2)


def by_sweep(run):
    """Do what a sweep does with a trial that was interrupted."""
    sweep, seen = trials.Sweep("tiny", "full", (), (), ((),)), []
    trials.run(sweep, run.path.parent, 1, lambda words, log: seen.extend(words) or 1)
    assert "--resume" in seen


def tree(folder):
    """Return the content of a folder's files, but for locks, notes about restarts and drafts that cannot be removed."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.name not in ("restarts.jsonl", "tracking.json", run_lock.NAME)
        and path.name[0] != "."
    }


def complete_ones(run):
    return {name: content for name, content in tree(run.checkpoints).items() if not name.startswith("checkpoint-9/")}


@pytest.mark.parametrize("resume", [launched, restarted, by_torchrun, by_sweep], ids=lambda one: one.__name__)
def test_nothing_is_lost_at_any_call(original, tmp_path, monkeypatch, resume, capsys):
    """Faults come at each call in turn, for one call or from then on; afterwards the run resumes as without them."""
    run = RunFolder(tmp_path / "trial-001")
    faults = Faults(monkeypatch, run.path)
    monkeypatch.setattr(os, "fsync", lambda file: None)  # thousands of which take a minute

    def fresh():
        shutil.rmtree(run.path, ignore_errors=True)
        shutil.copytree(original.path, run.path)

    fresh()
    faults.begin()
    resume(run)
    calls, wanted, kept = faults.end(), tree(run.path), complete_ones(original)
    if resume is not by_sweep:
        assert calls > 30 and [row["step"] for row in read_jsonl(run.metrics)] == [1, 2, 3, 4, 5, 6]
        assert not (run.checkpoints / "checkpoint-9").exists()
    refused = 0
    for first in range(1, calls + 1):
        for last, number in ((1, NUMBERS[first % 4]), (10**9, NUMBERS[first // 4 % 4])):
            fresh()
            faults.begin(number, lambda at, first=first, last=last: first <= at < first + last)
            try:
                resume(run)
            except UserError as error:
                refused += 1
                assert str(run.path) in str(error) and os.strerror(number) in str(error), error
            except OSError as error:  # which every command prints as one line, too
                refused += 1
                assert error.errno == number and str(run.path) in str(error.filename)
            faults.end()
            where = f"{resume.__name__}, {errno.errorcode[number]} at call {first} of {calls}"
            assert complete_ones(run) == kept, where
            assert [row["step"] for row in read_jsonl(run.metrics)][:6] == [1, 2, 3, 4, 5, 6], where
            (run.path / run_lock.NAME).unlink(missing_ok=True)  # this process lives on
            resume(run)
            assert tree(run.path) == wanted, where
    assert refused > calls
    capsys.readouterr()


@pytest.mark.parametrize("number", NUMBERS)
def test_an_unreadable_file_is_not_a_damaged_one(original, tmp_path, monkeypatch, number):
    shutil.copytree(original.path, tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    file = run.checkpoints / "checkpoint-6" / FILES[0]
    opened = Path.open

    def refuse(path, *arguments, **options):
        if path == file:
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    for search in (newest_checkpoint, digests.newest_intact):
        with pytest.raises(FileUnusable, match=f"{file}: {os.strerror(number)}") as caught:
            search(run)
        assert "move an unreadable checkpoint elsewhere" in str(caught.value)
    monkeypatch.undo()
    assert tree(run.path) == tree(original.path)


def test_what_the_user_keeps_beside_the_checkpoints_stays(original, tmp_path, capsys):
    run = RunFolder(tmp_path / "run")
    shutil.copytree(original.path, run.path)
    copies = {
        "checkpoint-6-backup",
        "checkpoint-06",
        "checkpoint-",
        "checkpoint-best",
        "old-checkpoint-6",
        "checkpoint-6.tar",
    }
    for name in copies:
        shutil.copytree(run.checkpoints / "checkpoint-3", run.checkpoints / name)
    (run.checkpoints / "checkpoint-7").write_text("a file")
    (run.checkpoints / "checkpoint-latest").symlink_to("checkpoint-6")
    moved = tmp_path / "elsewhere"
    (run.checkpoints / "checkpoint-9").rename(moved)
    (run.checkpoints / "checkpoint-9").symlink_to(moved)  # an unfinished one on another disk
    by_torchrun(run)
    names = {path.name for path in run.checkpoints.iterdir()}
    assert names == copies | {
        "checkpoint-3",
        "checkpoint-6",
        "checkpoint-3-backup",
        "checkpoint-7",
        "checkpoint-latest",
    }
    assert len(list(moved.iterdir())) == 2 and "stays" in capsys.readouterr().out


@pytest.mark.parametrize("which", ["checkpoints", "checkpoint-6"])
def test_a_disk_that_is_not_mounted_is_not_a_run_without_checkpoints(original, tmp_path, which):
    run = RunFolder(tmp_path / "run")
    shutil.copytree(original.path, run.path)
    place = run.checkpoints if which == "checkpoints" else run.checkpoints / which
    place.rename(tmp_path / "disk")
    place.symlink_to(tmp_path / "disk")
    by_torchrun(run)
    (tmp_path / "disk").rename(tmp_path / "unmounted")
    for resume in (launched, by_torchrun):
        with pytest.raises(FileUnusable, match=f"{place}: a link to {tmp_path}/disk, which does not exist"):
            resume(run)
    assert len(read_jsonl(run.metrics)) == 6


def test_old_checkpoints_go_once_the_new_one_is_complete(original, tmp_path, capsys):
    run = RunFolder(tmp_path / "run")
    shutil.copytree(original.path, run.path)
    rotation = Checkpoints(read_recipe(run), run, {}, needed=0, gathered=0)

    def left():
        return sorted(path.name for path in run.checkpoints.iterdir())

    before = left()
    rotation._remove_old()  # the newest is not complete
    assert left() == before
    write_json(run.checkpoints / "checkpoint-9" / COMPLETE, {"world_size": 2, "layout": {}, "files": {FILES[0]: 99}})
    rotation._remove_old()  # nor is it, cut off
    assert left() == before
    write_json(run.checkpoints / "checkpoint-9" / COMPLETE, {"world_size": 2, "layout": {}, "files": {FILES[0]: 100}})
    (run.checkpoints / "checkpoint-1").symlink_to(run.checkpoints / "checkpoint-3-backup")
    rotation._remove_old()
    assert left() == ["checkpoint-1", "checkpoint-3-backup", "checkpoint-6", "checkpoint-9"]
    assert capsys.readouterr().out == ""


def test_a_damaged_checkpoint_is_set_aside_and_the_only_one_stays(original, tmp_path, capsys):
    run = RunFolder(tmp_path / "run")
    shutil.copytree(original.path, run.path)
    os.truncate(run.checkpoints / "checkpoint-6" / FILES[1], 3)
    by_torchrun(run)
    assert (run.checkpoints / "checkpoint-6-damaged" / FILES[0]).exists()
    wrong = f"checkpoint-6/{FILES[1]} is damaged (it has 3 bytes, and 100 were written)"
    assert wrong in capsys.readouterr().err
    (run.checkpoints / "checkpoint-3" / FILES[0]).unlink()
    before = tree(run.path)
    for resume in (launched, by_torchrun):
        with pytest.raises(UserError, match=f"no complete checkpoint.*|checkpoint-3/{FILES[0]} is damaged"):
            resume(run)
    assert tree(run.path) == before


@pytest.mark.parametrize(
    ("content", "why"),
    {
        b"global_step9": "it names 'global_step9', and the checkpoint has global_step)",
        b"": "it names '', and",
        b"global_step\n": r"it names 'global_step\n', and",
        b"\xff\x00": "it names '\ufffd\\x00', and",
        None: "it is missing)",
        "gone": "a link to gone, which does not exist)",
    }.items(),
)
def test_a_damaged_latest_is_described(original, tmp_path, capsys, content, why):
    run = RunFolder(tmp_path / "run")
    shutil.copytree(original.path, run.path)
    checkpoint = run.checkpoints / "checkpoint-6"
    latest, written = checkpoint / "latest", run_folder.read_json(checkpoint / COMPLETE)
    latest.write_text("global_step")
    written["files"]["latest"], written["digests"]["latest"] = 11, digests.of_file(latest)
    write_json(checkpoint / COMPLETE, written)
    assert digests.newest_intact(run) == checkpoint
    latest.unlink()
    if isinstance(content, bytes):
        latest.write_bytes(content)
    elif content:
        latest.symlink_to(content)
    assert digests.newest_intact(run).name == "checkpoint-3"
    assert f"checkpoint-6/latest is damaged ({why}" in capsys.readouterr().err


def test_a_run_that_has_saved_does_not_start_again_without_its_disk(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    write_recipe(run, replace(pages.find("tiny", "full"), save_steps=2))
    rows = [{"step": step, "loss": 1.0} for step in range(1, 4)]
    write_jsonl(run.metrics, rows[:2])
    run_folder.forget_after(run, None)
    assert not run.metrics.exists(), "it died before its first checkpoint was complete"
    run_folder.accept_recipe(run)
    write_jsonl(run.metrics, rows)
    for there in (False, True):
        if there:
            run.checkpoints.mkdir()  # an empty mount point
        with pytest.raises(UserError, match=r"no checkpoint, although the run has trained 3 steps .* mounted\?"):
            run_folder.forget_after(run, None)
    assert read_jsonl(run.metrics) == rows


def test_a_rank_whose_folder_cannot_be_read_ends_with_the_reason_and_its_status(tmp_path, monkeypatch, capsys):
    run, ended = RunFolder(tmp_path), []
    monkeypatch.setattr(os, "_exit", ended.append)
    for file, writers in ((run.recipe, {}), (run.tracking, {"wandb": SimpleNamespace(alert=print, finish=print)})):
        file.write_text("{")
        with contextlib.suppress(UserError):  # of the tracker's notes, after the exit
            training_run.fail("recipe.json: Input/output error", 2, Trackers(run, writers))
    assert ended == [2, 2] and capsys.readouterr().err.count("Input/output error\n") == 2


@pytest.mark.parametrize("cut", [b'{"step": 9, "lo', b'{"step": 9, "at": {"lo', b"\0\0\0", b"{"])
def test_a_log_that_was_cut_off_is_read_around_the_cut(cut, tmp_path):
    log = tmp_path / "metrics.jsonl"
    rows = [{"step": 1, "at": {"loss": 1.0}}, {"step": 2}]
    write_jsonl(log, rows)
    before = log.read_bytes()
    log.write_bytes(before + cut)
    assert read_jsonl(log) == rows
    log.write_bytes(before + cut + before)
    assert read_jsonl(log) == rows * 2
