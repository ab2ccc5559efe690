"""Start workers on two CPU ranks with the real launchers, once per test session, and read what they wrote."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORKERS = ROOT / "tests" / "workers"
BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "WANDB_"))}
    path = f"{BIN}{os.pathsep}{kept.get('PATH', '')}"  # ninja, which builds DeepSpeed's ops, stands there
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    return {**kept, **quiet, "PATH": path, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}


def run(command: list[str], folder: Path, timeout: int = 400) -> str:
    """Run a launcher in `folder` and return its output; whatever it started is ended with it."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, output[-3000:]
    return output


def deepspeed_launch(worker: str, *arguments: str, ranks: int = 2) -> list[str]:
    port = str(free_port())
    head = [str(BIN / "deepspeed"), "--no_local_rank", "--num_gpus", str(ranks), "--master_port", port]
    return [*head, str(WORKERS / worker), *arguments]


def accelerate_launch(config: str, worker: str, *arguments: str) -> list[str]:
    head = [str(BIN / "accelerate"), "launch", "--config_file", str(ROOT / "configs" / "accelerate" / config)]
    return [*head, "--main_process_port", str(free_port()), str(WORKERS / worker), *arguments]


@cache
def used(mode: str, *names: str) -> dict[str, dict]:
    """Return what each template's engine was, after two steps in one process pair."""
    with tempfile.TemporaryDirectory(prefix="use_config_") as folder:
        output = Path(folder) / "seen.json"
        templates = [str(ROOT / "configs" / f"{name}.json") for name in names]
        if mode == "accelerate":
            (Path(folder) / "configs").symlink_to(ROOT / "configs")  # the YAML's path starts where one launches
            command = accelerate_launch("zero3.yaml", "use_config.py", mode, str(output), *templates)
        else:
            command = deepspeed_launch("use_config.py", mode, str(output), *templates)
        log = run(command, Path(folder))
        assert output.exists(), log[-3000:]
        return json.loads(output.read_text())
