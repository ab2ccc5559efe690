"""DeepSpeed's C++ ops: which ones a DeepSpeed file needs, and that the launcher compiles what is missing, and says so.

That DeepSpeed asks for these ops and no others is tested on real ranks, in test_configs_run.py.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from deepspeed_recipes.machine import ops
from deepspeed_recipes.recipe.deepspeed_file import parse, read
from deepspeed_recipes.recipe.errors import UserError
from tests import ROOT

OFFLOAD = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
NVME = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}}}


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({}, ""),
        ({"zero_optimization": {"stage": 3}}, ""),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}}, ""),
        (OFFLOAD, "cpu_adam"),
        (OFFLOAD | {"optimizer": {"type": "AdamW"}}, "cpu_adam"),
        (OFFLOAD | {"optimizer": {"type": "SGD"}}, ""),
        (OFFLOAD | {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, ""),
        ({"optimizer": {"type": "Adam", "params": {"lr": "auto"}}}, "fused_adam"),
        ({"optimizer": {"type": "Muon"}}, "fused_adam"),
        ({"optimizer": {"type": "Lion"}}, ""),
        (NVME, "pin_memory async_io"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}, "cpu_adam pin_memory async_io"),
    ],
)
def test_what_a_deepspeed_file_needs(config, names):
    assert [op.name for op in ops.needed(parse(config))] == names.split()


def test_every_shipped_config_needs_ops_that_are_known():
    configs = sorted((ROOT / "configs").glob("*.json"))
    assert len(configs) == 23
    found = {op for path in configs for op in ops.needed(read(path))}
    assert found == set(ops.OPS["cuda"]) == set(ops.OPS["cpu"]) - {ops.SHARED_MEMORY}


def compiled(folder: Path, name: str, monkeypatch) -> Path:
    """Write what a compiled op leaves behind, and return its folder."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
    (folder / name).mkdir()
    (folder / name / f"{name}.so").touch()
    ops.stamp(name)
    return folder / name


def test_what_is_compiled_is_not_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert ops.missing(ops.OPS["cpu"]) == ops.OPS["cpu"]
    compiled(tmp_path, "cpu_adam", monkeypatch)
    assert ops.missing([ops.CPU_ADAM, ops.FUSED_ADAM]) == (ops.FUSED_ADAM,)


def test_an_environment_under_another_path_is_not_compiled_again(tmp_path, monkeypatch):
    compiled(tmp_path, "cpu_adam", monkeypatch)
    other = tmp_path.with_name(tmp_path.name + "-mounted")
    other.symlink_to(tmp_path)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(other))
    assert not ops.missing([ops.CPU_ADAM])


def test_what_a_killed_build_or_other_versions_have_left_is_compiled_again(tmp_path, monkeypatch):
    folder = compiled(tmp_path, "cpu_adam", monkeypatch)
    stamp = (folder / ops.STAMP).read_text()
    (folder / ops.STAMP).write_text(stamp.replace(metadata.version("torch"), "2.0.0"))
    assert ops.missing([ops.CPU_ADAM])
    (folder / ops.STAMP).unlink()  # the linker had begun to write the library
    assert ops.missing([ops.CPU_ADAM])


def test_nothing_is_started_where_nothing_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("started a process"))
    ops.prepare(ops.needed(parse({})), os.environ)


def compiler(folder: Path, script: str) -> dict[str, str]:
    """Return an environment without ops and with a C++ compiler that is this shell script."""
    tool = folder / "c++"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    # ninja and the linker's test call the compiler by name; `which` and torch read CXX.
    return {**os.environ, "TORCH_EXTENSIONS_DIR": str(folder / "ops"), "CXX": str(tool), "DS_ACCELERATOR": "cpu"}


def test_a_compiler_that_fails_is_one_line_and_no_run(tmp_path, monkeypatch, capfd):
    fails = "echo 'fatal error: no memory' >&2; exit 1"
    variables = compiler(tmp_path, f'case "$*" in *-c*) {fails};; esac; exec g++ "$@"')
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", variables["TORCH_EXTENSIONS_DIR"])
    with pytest.raises(UserError, match=r"pin_memory: does not compile; .*doctor"):
        ops.prepare([ops.PIN_MEMORY], variables)
    said = capfd.readouterr()
    assert "DeepSpeed op pin_memory (NVMe offload): compiling, about 15 s on two cores, once" in said.out
    assert "error" in said.err.lower() and "Traceback" not in said.err


def test_the_lock_of_a_killed_build_is_removed(tmp_path, monkeypatch, capsys):
    """Else torch would wait for it for ever, where the library exists too."""
    left = [tmp_path / "cpu_adam" / "lock", compiled(tmp_path, "fused_adam", monkeypatch) / "lock"]
    left[0].parent.mkdir()
    held = tmp_path / "pin_memory" / "lock"
    held.parent.mkdir()
    for file in (*left, held):
        file.touch()
    with held.open(), contextlib.ExitStack() as locks:
        for op in ops.OPS["cpu"]:
            locks.enter_context(ops.lock(op.name))
        assert held.exists() and not any(file.exists() for file in left)
    assert capsys.readouterr().err.count("which a build that was killed has left") == 2


@pytest.mark.every
def test_a_build_that_does_not_end_is_given_up(tmp_path, monkeypatch):
    variables = compiler(tmp_path, 'case "$*" in *-c*) sleep 20;; esac; exec g++ "$@"')
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", variables["TORCH_EXTENSIONS_DIR"])
    monkeypatch.setattr(ops, "LONGEST", 6)
    with pytest.raises(UserError, match=r"pin_memory: still compiling after"):
        ops.prepare([ops.PIN_MEMORY], variables)


@pytest.mark.every
@pytest.mark.parametrize("seconds", [3, 5, 8, 11, 14])
def test_a_build_that_was_killed_at_any_moment_is_in_nobodys_way(tmp_path, seconds):
    variables = compiler(tmp_path, 'exec g++ "$@"')
    command = [sys.executable, "-m", "deepspeed_recipes.machine.ops", "pin_memory"]
    with subprocess.Popen(command, env=variables, cwd=ROOT, start_new_session=True) as first:
        time.sleep(seconds)
        os.killpg(first.pid, signal.SIGKILL)
    assert subprocess.run(command, env=variables, cwd=ROOT, timeout=900).returncode == 0
    folder = tmp_path / "ops" / "pin_memory"
    assert (folder / ops.STAMP).exists() and not (folder / "lock").exists()
