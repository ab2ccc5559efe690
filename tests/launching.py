"""Train with DeepSpeed templates on two CPU ranks and read the engine's settings; run other projects' launchers."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tests.ranks import Ranks, free_port, read_logs

ROOT = Path(__file__).resolve().parents[1]
WORKERS = ROOT / "tests" / "workers"
BIN = Path(sys.executable).parent
LAUNCH = [sys.executable, str(ROOT / "scripts" / "launch.py")]


def gpus() -> int:
    """Return how many GPUs the machine has; the tests themselves hide them."""
    if not shutil.which("nvidia-smi"):
        return 0
    return len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines())


def environment(on_gpu: bool = False) -> dict[str, str]:
    dropped = ("ACCELERATE_", "WANDB_") + (("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR") if on_gpu else ())
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    path = f"{BIN}{os.pathsep}{kept.get('PATH', '')}"  # ninja, which builds DeepSpeed's ops, is there
    return {**kept, "PATH": path}


def run(command: list[str], folder: Path, timeout: int = 400, on_gpu: bool = False) -> str:
    """Run a launcher in `folder` and return its output; nothing that it has started outlives it."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment(on_gpu),
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


def launched(*words: str) -> tuple[int, str]:
    """Return the exit status and the output of `ds-recipes launch`, in this process."""
    from deepspeed_recipes.commands import main

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            status = main.run("launch", [*words])
        except SystemExit as end:  # argparse
            status = int(end.code or 0)
    return status, said.getvalue()


def accelerate_launch(config: str, *arguments: str) -> list[str]:
    head = [str(BIN / "accelerate"), "launch", "--config_file", str(ROOT / "configs" / "accelerate" / config)]
    return [*head, "--main_process_port", str(free_port()), *arguments]


def train_with(ranks: Ranks, folder: Path, mode: str, template: Path) -> dict:
    """Train two steps with `template` and return the engine's settings, or the error; `mode` as in `use`."""
    from tests.workers.use_config import use  # imports the whole stack, which most tests can do without

    output = folder / f"{mode}-{template.stem}"
    ranks.check(use, mode, str(template), str(output), log=folder / f"{output.name}.log")
    assert (output / "seen.json").exists(), "\n".join(read_logs(folder / f"{output.name}.log"))
    return json.loads((output / "seen.json").read_text())
