"""Runs each contender in its own process, forked from a process that has imported the libraries.

Contenders must not share memory. Importing PyTorch, DeepSpeed and transformers takes 6 to 20 s, as long as some
contenders train, so it is done once.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from unittest import mock

from ..launching.command import deepspeed_command, rank_environment, visible_gpus
from ..machine.children import killed_with_this_process
from ..recipe.files import Json
from ..recipe.project import IMPORT_ROOT
from ..recipe.run_folder import RunFolder

MEASURE = "deepspeed_recipes.benchmarks.measure"
OUT_OF_MEMORY = "out of memory"


def start(order: Json, folder: Path, seconds: float) -> Json:
    """Run a contender for at most `seconds`; return its measurements, or a short `error` and its whole `output`.

    `folder` holds the order, the result and the printed output.
    """
    asked, result, printed = folder / "order.json", folder / "result.json", folder / "output.txt"
    asked.write_text(json.dumps(order))
    ranks = order["case"] != "limits" and order["case"]["peer"] == "recipe"  # the others are processes without ranks
    words = (str(asked), str(result))
    variables: dict[str, str] = {}
    if ranks:  # what a launcher would set for the only rank
        command = deepspeed_command(RunFolder(Path(".")), 1)
        variables |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": command[command.index("--master_port") + 1]}
    process = _forks().Process(target=_measure, args=(words, printed, variables))
    process.start()
    assert process.pid
    with killed_with_this_process(process.pid):
        try:
            process.join(max(1, seconds))
            late = process.is_alive()
        finally:
            with suppress(ProcessLookupError):  # it and everything it started have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # it may have been too early to have its own group
            process.join()
    if late:
        return {"error": f"not finished in {seconds:.0f} s", "output": _text(printed)}
    if result.exists():
        return json.loads(result.read_text())
    return {"error": cause(_text(printed)), "output": _text(printed)}


@cache
def _forks() -> ForkServerContext:
    """Start a process that imports the libraries, and return the context that forks processes from it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([MEASURE])
    # Libraries read these variables while they are imported. torch then counts GPUs through the driver's management
    # library, which leaves CUDA uninitialised for the forks.
    read = {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    with mock.patch.dict(os.environ, rank_environment(1, visible_gpus()) | read):
        forkserver.ensure_running()
    return context


def cause(output: str) -> str:
    """Return why a contender failed, in a few words."""
    if "out of memory" in output.lower() or "OutOfMemory" in output:
        return OUT_OF_MEMORY
    return (output.strip().splitlines() or ["ended without any output"])[-1][:160]


def _measure(words: tuple[str, str], printed: Path, variables: Mapping[str, str]) -> None:
    """Run an order in a freshly forked process."""
    os.setsid()
    with printed.open("wb") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ |= variables
    os.chdir(IMPORT_ROOT)
    import torch

    if torch.cuda._is_in_bad_fork():  # an import has initialised CUDA, which a fork cannot use
        sys.exit(subprocess.run([sys.executable, "-m", MEASURE, *words]).returncode)
    from tqdm import tqdm

    from .measure import main

    tqdm.set_lock(threading.RLock())  # its default lock, between processes, would outlive `os._exit`
    main(*words)


def _text(printed: Path) -> str:
    return printed.read_text(errors="replace") if printed.exists() else ""
