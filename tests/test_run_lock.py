"""One writer per run folder: a living process keeps others out, a dead one does not."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace

import psutil
import pytest

from deepspeed_recipes.launching import node
from deepspeed_recipes.machine import run_lock
from deepspeed_recipes.recipe import pages, run_folder
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.run_folder import COMPLETE, RunFolder, write_json, write_recipe

HOLD = """
import sys, time
from pathlib import Path
from deepspeed_recipes.machine import run_lock
with run_lock.hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def writer(tmp_path):
    """Start another process that writes to a run folder; return it and the run."""
    run = RunFolder(tmp_path / "run")
    write_recipe(run, replace(pages.find("tiny", "full"), save_steps=5))
    write_json(run.checkpoints / "checkpoint-5" / COMPLETE, {"step": 5, "world_size": 2, "layout": {}, "files": {}})
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(run.path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process, run
    process.kill()
    process.wait()


@pytest.mark.parametrize("words", [["--resume"], []], ids=["resumed", "started"])
def test_a_run_that_is_being_written_cannot_be(words, writer, refusal):
    process, run = writer
    shutil.rmtree(run.checkpoints)  # as before the first one: the folder must not be called one to remove
    holder = json.loads((run.path / run_lock.NAME).read_text())
    said = refusal("launch", "tiny", "full", *words, "--output-dir", run.path)
    assert f"written by process {process.pid} on {holder['host']}" in said and said.count("\n") == 1
    with pytest.raises(UserError, match=f"process {process.pid} on"), run_lock.hold(run.path):
        pass
    assert json.loads((run.path / run_lock.NAME).read_text()) == holder


def test_a_killed_process_holds_nothing(writer):
    process, run = writer
    process.kill()
    process.wait()
    run_lock.check(run.path)
    with run_lock.hold(run.path):
        assert json.loads((run.path / run_lock.NAME).read_text())["pid"] == os.getpid()
    assert {path.name for path in run.path.iterdir()} == {"recipe.json", "checkpoints"}


def test_a_reused_process_number_holds_nothing(tmp_path):
    with run_lock.hold(tmp_path):
        lock = tmp_path / run_lock.NAME
        write_json(lock, json.loads(lock.read_text()) | {"started": 1})
        run_lock.check(tmp_path)


def test_a_process_on_another_host_is_judged_by_its_heartbeat(writer, monkeypatch):
    process, run = writer
    lock = run.path / run_lock.NAME
    write_json(lock, json.loads(lock.read_text()) | {"host": "elsewhere", "pid": 1})
    with pytest.raises(UserError, match="process 1 on elsewhere"):
        run_lock.check(run.path)
    process.kill()
    process.wait()
    monkeypatch.setattr(run_lock, "LISTENED", 0.2)
    silent = time.time() - run_lock.SILENT - 5
    os.utime(lock, (silent, silent))
    run_lock.check(run.path)


def test_the_heart_beats(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT", 0.05)
    with run_lock.hold(tmp_path):
        os.utime(tmp_path / run_lock.NAME, (0, 0))
        time.sleep(0.5)
        assert time.time() - (tmp_path / run_lock.NAME).stat().st_mtime < 5


def test_a_node_waits_for_a_writer_that_is_ending(writer, monkeypatch, tmp_path):
    process, run = writer
    monkeypatch.setattr(node, "start", lambda *_: 0)
    threading.Timer(1, lambda: (process.kill(), process.wait())).start()
    words = ["--nodes", "1", "--gpus", "2", "--master-addr", "localhost", "--master-port", "1", "--node-rank", "0"]
    at = time.monotonic()
    assert node.main([str(run.path), *words]) == 0
    assert 0.9 < time.monotonic() - at < 20


def test_only_one_of_many_takes_a_dead_processs_lock(writer):
    process, run = writer
    process.kill()
    process.wait()
    race = "import sys\nfrom pathlib import Path\nfrom deepspeed_recipes.machine import run_lock\n"
    race += "with run_lock.hold(Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()"
    command, pipes = (
        [sys.executable, "-c", race, str(run.path)],
        dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE),
    )
    racers = [subprocess.Popen(command, text=True, **pipes) for _ in range(6)]
    until = time.monotonic() + 60
    while sum(racer.poll() is None for racer in racers) > 1 and time.monotonic() < until:
        time.sleep(0.1)  # the one that holds it waits until the others have ended
    assert sum("held" in racer.communicate(timeout=60)[0] for racer in racers) == 1


CONTENTS = {
    "empty": b"",
    "cut off": b'{"host": "elsewh',
    "a list": b"[]",
    "no object": b"{}",
    "not text": b"\xff\xfe\x00",
    "of an older version": b'{"host": "elsewhere", "boot": "x", "pid": 1, "started": 1}',
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
@pytest.mark.parametrize("age", [-86400, 0, 86400], ids=["tomorrow", "now", "yesterday"])
def test_no_lock_blocks_a_start_for_ever_and_none_is_taken_from_a_living_process(tmp_path, monkeypatch, content, age):
    monkeypatch.setattr(run_lock, "LISTENED", 10)
    lock = tmp_path / run_lock.NAME
    lock.write_bytes(content)
    then = time.time() - age
    os.utime(lock, (then, then))
    stop = threading.Event()

    def beat():  # by a clock that differs as much
        while not stop.wait(0.02):
            os.utime(lock, (then + time.monotonic() % 1000, then + time.monotonic() % 1000))

    other = threading.Thread(target=beat)
    other.start()
    try:
        with pytest.raises(UserError, match="this run is being written by"), run_lock.hold(tmp_path):
            pass
        assert lock.read_bytes() == content
    finally:
        stop.set()
        other.join()
    os.utime(lock, (then, then))
    monkeypatch.setattr(run_lock, "SILENT", 0)
    monkeypatch.setattr(run_lock, "LISTENED", 0.2)
    with run_lock.hold(tmp_path):
        assert json.loads(lock.read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("odd", [{"started": None}, {"pid": "1/../.."}, {"pid": [1]}, {"pid": 2**70}])
def test_a_dead_process_of_this_host_is_dead_whatever_its_lock_lacks(tmp_path, monkeypatch, odd):
    monkeypatch.setattr(run_lock, "SILENT", 0)
    monkeypatch.setattr(run_lock, "LISTENED", 0.2)
    write_json(tmp_path / run_lock.NAME, run_lock._self() | {"pid": 2**22 + 1} | odd)
    with run_lock.hold(tmp_path, wait=5):
        pass


def test_a_lock_that_cannot_be_read_is_not_taken(tmp_path, monkeypatch):
    (tmp_path / run_lock.NAME).mkdir()  # to root, permissions are no hindrance
    with pytest.raises(OSError, match="writer"), run_lock.hold(tmp_path):
        pass


def test_processes_of_another_container_are_not_looked_for_here(tmp_path, monkeypatch):
    with run_lock.hold(tmp_path):
        lock = tmp_path / run_lock.NAME
        write_json(lock, json.loads(lock.read_text()) | {"processes": "pid:[1]", "pid": 2**22 + 1})
        with pytest.raises(UserError, match=f"process {2**22 + 1} on"):
            run_lock.check(tmp_path)


def test_a_folder_without_hard_links_has_one_writer_too(tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refused)
    with run_lock.hold(tmp_path):
        with pytest.raises(UserError, match=f"process {os.getpid()} on"), run_lock.hold(tmp_path):
            pass
        assert json.loads((tmp_path / run_lock.NAME).read_text())["pid"] == os.getpid()
    assert not tmp_path.exists()  # nothing has been written


WRITE = """
import sys, time
from pathlib import Path
from deepspeed_recipes.machine import run_lock
with run_lock.hold(Path(sys.argv[1])):
    while True:
        with open(sys.argv[2], "a") as log:
            log.write("x")
        time.sleep(0.01)
"""


def test_a_process_that_was_suspended_while_another_took_over_writes_no_more(tmp_path):
    log = tmp_path / "log"
    log.touch()
    command = [sys.executable, "-c", WRITE, str(tmp_path / "run"), str(log)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not log.stat().st_size:
        time.sleep(0.01)
    process.send_signal(signal.SIGSTOP)
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    written, lock = log.stat().st_size, tmp_path / "run" / run_lock.NAME
    other = json.loads(lock.read_text()) | {"host": "elsewhere", "pid": 77}
    write_json(lock, other)
    os.utime(lock, (1000, 1000))
    process.send_signal(signal.SIGCONT)
    assert process.wait(timeout=60) == 1
    assert "process 77 on elsewhere has taken it over" in process.stderr.read()
    assert log.stat().st_size == written
    assert json.loads(lock.read_text()) == other and lock.stat().st_mtime == 1000


def test_a_rank_whose_launcher_has_lost_the_lock_ends(tmp_path):
    with run_lock.hold(tmp_path):
        lock = run_lock.found(tmp_path)
        lock.check()
        write_json(tmp_path / run_lock.NAME, {"host": "elsewhere", "pid": 77})
        process = os.fork()
        if process == 0:
            lock.check()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 1
        write_json(tmp_path / run_lock.NAME, lock.holder)
        lock.check()
        (tmp_path / run_lock.NAME).unlink()
        lock.check()  # removed by hand: nobody else writes


def test_runs_of_one_second_get_folders_of_their_own(tmp_path, monkeypatch):
    """As when a script starts several, or in autumn, when an hour comes twice: a finished run is no checkpoint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_folder, "datetime", SimpleNamespace(now=lambda: datetime(2026, 10, 25, 2, 30)))
    for end in ("", "-2", "-3"):
        folder = run_folder.new(pages.find("tiny", "full"), None).path
        assert folder.name == f"20261025-023000{end}"
        folder.mkdir(parents=True)
