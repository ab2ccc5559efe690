"""Contenders in processes of their own, forked from one that has imported the libraries.

One contender's memory must not be another's. Importing PyTorch, DeepSpeed and transformers takes 6 to 20 s, as long as
many a contender's training, so it is done once.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from ..launching.command import deepspeed_command, rank_environment, visible_gpus
from ..machine.children import killed_with_this_process
from ..recipe.project import IMPORT_ROOT
from ..recipe.run_folder import RunFolder

MEASURE = "deepspeed_recipes.benchmarks.measure"
OUT_OF_MEMORY = "out of memory"


def start(order: dict[str, Any], folder: Path, seconds: float) -> dict[str, Any]:
    """Return what a contender measures, or its `error`, in a few words, with its whole `output`.

    Args:
        order: what `measure` is to do.
        folder: for the order, the result and what is printed.
        seconds: after which it is ended.
    """
    asked, result, printed = folder / "order.json", folder / "result.json", folder / "output.txt"
    asked.write_text(json.dumps(order))
    ranks = order["case"] != "limits" and order["case"]["peer"] == "recipe"  # the others are processes without ranks
    words = (str(asked), str(result))
    process = _forks().Process(target=_measure, args=(words, printed, _of_the_only_rank() if ranks else {}))
    process.start()
    assert process.pid
    with killed_with_this_process(process.pid):
        try:
            process.join(max(1, seconds))
            late = process.is_alive()
        finally:
            with suppress(ProcessLookupError):  # it has ended, and started nothing that has not
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # it may not have got as far as to be a group
            process.join()
    if late:
        return {"error": f"not finished in {seconds:.0f} s", "output": _text(printed)}
    if result.exists():
        return json.loads(result.read_text())
    return {"error": cause(_text(printed)), "output": _text(printed)}


@cache
def _forks() -> ForkServerContext:
    """Return what forks processes from one with the libraries, which begins to import them now."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([MEASURE])
    with _environment(_of_the_libraries()):
        forkserver.ensure_running()
    return context


def cause(output: str) -> str:
    """Return why a contender failed, in a few words."""
    if "out of memory" in output.lower() or "OutOfMemory" in output:
        return OUT_OF_MEMORY
    return (output.strip().splitlines() or ["ended without any output"])[-1][:160]


def _measure(words: tuple[str, str], printed: Path, variables: Mapping[str, str]) -> None:
    """Do what an order says, in a process that was just forked."""
    os.setsid()
    with printed.open("wb") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ |= variables
    os.chdir(IMPORT_ROOT)
    import torch

    if torch.cuda._is_in_bad_fork():  # an import has asked for devices, after which a fork cannot use CUDA
        sys.exit(subprocess.run([sys.executable, "-m", MEASURE, *words]).returncode)
    from tqdm import tqdm

    from .measure import main

    tqdm.set_lock(threading.RLock())  # its own, between processes, would be left behind by `os._exit`
    main(*words)


def _text(printed: Path) -> str:
    return printed.read_text(errors="replace") if printed.exists() else ""


def _of_the_libraries() -> dict[str, str]:
    """Return the variables that libraries read while they are imported."""
    offline = {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1")}
    # Whether there are GPUs is asked of the driver's management library, which leaves CUDA to the forks.
    return rank_environment(1, visible_gpus()) | offline | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def _of_the_only_rank() -> dict[str, str]:
    """Return the variables that a launcher would set for the only rank."""
    command = deepspeed_command(RunFolder(Path(".")), 1)
    return {
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": command[command.index("--master_port") + 1]},
    }


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ |= variables
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before
