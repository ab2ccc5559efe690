"""The doctor, on the machine that runs the tests."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

from deepspeed_recipes.commands import doctor
from deepspeed_recipes.machine import ops, software, system

ROOT = Path(__file__).resolve().parents[1]


def states(printed: str) -> dict[str, str]:
    return {check["name"]: check["state"] for check in json.loads(printed)}


def test_this_machine_can_train(tmp_path: Path, capsys):
    status = doctor.main(["--json", "--output-dir", str(tmp_path), "--nvme", str(tmp_path / "swap")])
    said = capsys.readouterr()
    found = states(said.out)
    assert said.err == ""
    assert {"torch", "deepspeed", "GPU", "g++", "ninja", "libaio", "/dev/shm", "disk", "W&B"} <= set(found)
    assert found["torch"] == found["deepspeed"] == "ok"
    assert status == ("error" in found.values())
    assert not list((tmp_path / "swap").iterdir())


def test_what_would_stop_a_run_is_an_error(tmp_path: Path, monkeypatch, capsys):
    hosts = tmp_path / "hosts"
    hosts.write_text("nowhere.invalid slots=8  # no such host\n")
    monkeypatch.setenv("PATH", "/nowhere")
    assert doctor.main(["--json", "--checkpoint-gib", "1e9", "--hostfile", str(hosts)]) == 1
    found = states(capsys.readouterr().out)
    assert found["disk"] == found["ssh nowhere.invalid"] == found["pdsh"] == found["g++"] == "error"


def test_the_table_names_a_fix_for_each_error(capsys):
    assert doctor.main(["--checkpoint-gib", "1e9"]) == 1
    lines = capsys.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("error"))
    assert "disk" in lines[at]
    assert lines[at + 1].strip().startswith("fix:")
    assert "error" in lines[-1]


def test_a_missing_package_is_an_error(monkeypatch):
    monkeypatch.setattr(software, "NEEDED", ("no-such-package", "torch"))
    assert [check.state for check in software.versions() if check.name != "python"] == ["error", "ok"]


def test_direct_io_is_measured_or_refused(tmp_path: Path):
    write, read = system.nvme(tmp_path, megabytes=16)
    assert float(write.found.split()[0]) > 0
    assert float(read.found.split()[0]) > 0
    (refused,) = system.nvme(Path("/proc/nowhere"))
    assert refused.state == "error"


def test_no_key_is_ever_shown(monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    monkeypatch.setenv("WANDB_MODE", "")
    doctor.main(["--json"])
    said = capsys.readouterr()
    assert "0123456789" not in said.out + said.err
    assert "a key is set" in said.out


def test_a_second_build_waits_for_the_first(tmp_path: Path):
    """While the test holds the lock, no build starts; nothing is compiled."""
    with open(tmp_path / f".{ops.OPS['cpu'][0].name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, str(ROOT / "scripts" / "doctor.py"), "--build"]
        environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path), "DS_ACCELERATOR": "cpu"}
        waiting = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            said = next(line for line in waiting.stdout if line.strip())
            assert b"another build of deepspeed_shm_comm is running" in said
            assert waiting.poll() is None
            assert not list(tmp_path.glob("*/*"))
        finally:
            waiting.kill()
            waiting.communicate()
