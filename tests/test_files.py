"""Every file is written whole: whatever stops a write, the old file is as it was."""

import ast
import errno
import os
import signal
import subprocess
import sys
import threading

import pytest

from deepspeed_recipes.commands.main import run as run_command
from deepspeed_recipes.recipe import files
from deepspeed_recipes.recipe.project import PACKAGE
from deepspeed_recipes.recipe.run_folder import write_json, write_jsonl
from tests import ROOT
from tests.test_disk import full as full

ELSEWHERE = {
    "benchmarks/measure.py": "a result in a temporary folder",
    "benchmarks/own_process.py": "an order in a temporary folder, and a process's output",
    "benchmarks/probe.py": "the null device",
    "benchmarks/overhead.py": "a process's output",
    "commands/doctor/measure.py": "a process's output",
    "commands/export.py": "a new folder, which is renamed",
    "commands/sweep/trials.py": "a process's output",
    "launching/node.py": "a hostfile in a temporary folder",
    "machine/ops.py": "a stamp that is renamed, and an empty file to lock",
    "machine/run_lock.py": "the lock, which is linked",
    "export/shrink.py": "a new folder",
    "prove/prove.py": "a new folder for each report",
    "scripts/maintain/calibration/cpu_speed.py": "data in a temporary folder",
    "scripts/maintain/samples/make_data.py": "imports nothing of the project; git has the old file",
    "scripts/maintain/samples/pretrain.py": "imports nothing of the project; git has the old file",
    "export/serve/process.py": "a process's output",
    "export/quantize/gguf_answer.py": "answers in a temporary folder",
    "export/quantize/write.py": "a temporary folder, and a new one, which is renamed",
    "launching/preflight.py": "a process's output",
    "recipe/files.py": "the draft itself",
    "training/callbacks/profiler.py": "a trace that is renamed",
    "training/callbacks/stopping.py": "a stack, written by a native thread",
    "training/methods/rollouts/worker.py": "a pipe",
    "training/model/untrained.py": "a shard of a new name, which is renamed",
    "training/upstream.py": "a stack",
}
"""What writes in place, and why that loses nothing."""


def writes_in_place(text):
    """Return the calls in a module that open a file to write it anew, other than those of `files`."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        modes = [
            one.value for one in (*node.args, *(word.value for word in node.keywords)) if isinstance(one, ast.Constant)
        ]
        opened = name in ("open", "fdopen") and any(isinstance(mode, str) and mode[:1] in ("w", "x") for mode in modes)
        dumped = name == "dump" and owner in ("json", "yaml", "pickle")
        if opened or dumped or (name in ("write_text", "write_bytes") and owner != "files"):
            found.append(ast.unparse(node))
    return found


def test_nothing_else_is_written_in_place():
    known = {str(file.relative_to(PACKAGE)): file for file in PACKAGE.rglob("*.py")}
    known |= {
        str(file.relative_to(ROOT)): file for place in ("recipes", "scripts") for file in (ROOT / place).rglob("*.py")
    }
    known = {name: file for name, file in known.items() if not name.startswith("prove/defects/")}  # they run alone
    assert {name for name, file in known.items() if writes_in_place(file.read_text(encoding="utf-8"))} == set(ELSEWHERE)


@pytest.mark.parametrize(
    "code",
    [
        "path.write_text('a')",
        "path.with_suffix('.png').write_bytes(b'')",
        "open(path, 'w')",
        "path.open('wb')",
        "path.open(mode='x')",
        "json.dump(value, file)",
    ],
)
def test_a_write_in_place_is_noticed(code):
    assert writes_in_place(code) == [code]
    assert not writes_in_place(
        "files.write_text(path, 'a')\npath.open('a')\nopen(path)\npath.open('rb')\njson.dumps(1)"
    )


WRITES = {
    "text": lambda path: files.write_text(path, "x" * 50_000),
    "bytes": lambda path: files.write_bytes(path, b"x" * 50_000),
    "json": lambda path: write_json(path, ["x" * 50_000]),
    "jsonl": lambda path: write_jsonl(path, [{"a": "x" * 1000}] * 50),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_full_disk_leaves_the_old_file(full, write):
    filler = full / "filler"
    os.truncate(filler, filler.stat().st_size - 4096)  # one page, for the old file
    old = full / "file"
    old.write_text("old")
    with pytest.raises(OSError, match="No space left") as caught:
        write(old)
    assert caught.value.filename == str(old) and old.read_text() == "old"
    assert {path.name for path in full.iterdir()} == {"file", "filler"}


@pytest.mark.parametrize("call", ["open", "fsync", "replace", "fchmod", "link"])
def test_an_error_at_any_call_leaves_the_old_file(tmp_path, monkeypatch, call):
    old = tmp_path / "file"
    old.write_text("old")
    with monkeypatch.context() as patched:

        def refused(*_, **__):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patched.setattr(os, call, refused)
        with pytest.raises(OSError, match="No space left"):
            files.write_text(old, "new")
    assert old.read_text() == "old" and list(tmp_path.iterdir()) == [old]
    files.write_text(old, "new")
    assert old.read_text() == "new" and list(tmp_path.iterdir()) == [old]


KILLED = """
import os, sys
from pathlib import Path
from deepspeed_recipes.recipe import files
setattr(os, sys.argv[2], lambda *_, **__: os.kill(os.getpid(), 9))
files.write_text(Path(sys.argv[1]), "new")
"""


@pytest.mark.parametrize("call", ["fsync", "link"])
def test_a_kill_leaves_the_old_file_and_nothing_else(tmp_path, call):
    old = tmp_path / "file"
    old.write_text("old")
    assert subprocess.run([sys.executable, "-c", KILLED, str(old), call], cwd=ROOT).returncode == -signal.SIGKILL
    assert old.read_text() == "old" and list(tmp_path.iterdir()) == [old]


def test_a_file_system_whose_files_all_have_names_will_do(tmp_path, monkeypatch):
    opened = os.open

    def only_named(path, flags, *mode):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), str(path))
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", only_named)
    for content in ("old", "new"):
        files.write_text(tmp_path / "file", content)
        assert (tmp_path / "file").read_text() == content and len(list(tmp_path.iterdir())) == 1


def test_mode_and_links_are_kept(tmp_path):
    real = tmp_path / "real" / "config.json"
    real.parent.mkdir()
    real.write_text("{}")
    real.chmod(0o640)
    link = tmp_path / "config.json"
    link.symlink_to("real/config.json")
    files.write_text(link, "[]")
    assert link.is_symlink() and real.read_text() == "[]" and real.stat().st_mode & 0o777 == 0o640
    previous = os.umask(0o027)
    try:
        files.write_text(tmp_path / "new" / "file", "x")
    finally:
        os.umask(previous)
    assert (tmp_path / "new" / "file").stat().st_mode & 0o777 == 0o640
    (tmp_path / "dangling").symlink_to("later")
    files.write_text(tmp_path / "dangling", "x")
    assert (tmp_path / "later").read_text() == "x" and (tmp_path / "dangling").is_symlink()


def test_devices_and_pipes_stay_what_they_are(tmp_path):
    files.write_text(os_null := files.Path(os.devnull), "x")
    assert os_null.is_char_device()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    files.write_text(pipe, "through")
    reader.join()
    assert read == ["through"] and pipe.is_fifo()


def test_a_long_name_has_a_draft_too(tmp_path):
    path = tmp_path / ("é" * 120 + ".json")  # 245 bytes
    files.write_text(path, "x")
    assert path.read_text() == "x"


def test_fixing_a_config_through_a_link(tmp_path, capsys):
    real = tmp_path / "shared.json"
    real.write_text('{"train_micro_batch_size_per_gpu": 1, "zero_optimisation": {"stage": 2}}')
    real.chmod(0o664)
    (tmp_path / "mine.json").symlink_to("shared.json")
    run_command("check", [str(tmp_path / "mine.json"), "--fix"])
    capsys.readouterr()
    assert (tmp_path / "mine.json").is_symlink() and "zero_optimization" in real.read_text()
    assert real.stat().st_mode & 0o777 == 0o664
