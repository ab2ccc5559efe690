"""One writer per run folder: a living process keeps others out, a dead one does not."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from recipes.commands.main import run as run_command
from recipes.launching import node
from recipes.machine import run_lock
from recipes.spec import pages
from recipes.spec.errors import UserError
from recipes.spec.run_folder import COMPLETE, RunFolder, write_json, write_recipe

HOLD = """
import sys, time
from pathlib import Path
from recipes.machine import run_lock
with run_lock.hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def writer(tmp_path):
    """Start another process that writes to a run folder; return it and the run."""
    run = RunFolder(tmp_path / "run")
    write_recipe(run, replace(pages.find("tiny", "full"), save_steps=5))
    write_json(run.checkpoints / "checkpoint-5" / COMPLETE, {"step": 5, "world_size": 2, "files": {}})
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(run.path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process, run
    process.kill()
    process.wait()


def test_a_run_that_is_being_written_cannot_be_resumed(writer, capsys):
    process, run = writer
    holder = json.loads((run.path / run_lock.NAME).read_text())
    assert run_command("launch", ["tiny", "full", "--resume", "--output-dir", str(run.path)]) == 2
    said = capsys.readouterr().err
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
    race = "import sys, time\nfrom pathlib import Path\nfrom recipes.machine import run_lock\n"
    race += "with run_lock.hold(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(3)"
    command = [sys.executable, "-c", race, str(run.path)]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(6)]
    assert sum("held" in racer.communicate(timeout=60)[0] for racer in racers) == 1
