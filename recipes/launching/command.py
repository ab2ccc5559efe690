"""The ranks on a machine: how many, in which environment, and the command of DeepSpeed's launcher that starts them."""

import os
import shlex
import socket
import sys
from pathlib import Path

from recipes.launching import hosts
from recipes.launching.supervise import RANK_MODULE
from recipes.spec.errors import UserError, redact
from recipes.spec.pages import ROOT
from recipes.spec.run_folder import RunFolder
from recipes.training import ops


def visible_gpus() -> int:
    """Return how many GPUs this process may use; torch, seconds of imports, is asked only where a driver is."""
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not any(Path("/dev", name).exists() for name in ("kfd", "dxg")):
        return 0
    import torch

    return torch.cuda.device_count()


def rank_count(asked: int | None, gpus: int) -> int:
    """Return how many ranks to start on this machine.

    Raises:
        UserError: fewer than one, or more than there are GPUs.
    """
    if asked is None:
        return gpus or 2
    if asked < 1:
        raise UserError(f"--gpus {asked}: at least 1.")
    if gpus and asked > gpus:
        raise UserError(f"--gpus {asked}: this machine has {gpus}.")
    return asked


def deepspeed_command(
    folder: RunFolder, ranks: int, pool: hosts.Pool | None = None, master: str | None = None
) -> list[str]:
    """Return the DeepSpeed launcher's command for a run folder, on this machine or on the hosts of a pool."""
    # A port of our own: the launcher's default is often still held by a run that is dying.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = Path(sys.executable).with_name("deepspeed")
    where = hosts.launcher_options(pool, master or pool.hosts[0]) if pool else ["--num_gpus", str(ranks)]
    return [
        *([str(launcher)] if launcher.exists() else [sys.executable, "-m", "deepspeed.launcher.runner"]),
        *("--quiet", "--no_local_rank", *where, "--master_port", str(port)),
        *("--module", RANK_MODULE, str(folder.path)),
    ]


def rank_environment(ranks: int, gpus: int) -> dict[str, str]:
    """Return the environment of the ranks."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    extra = {
        "PYTHONPATH": os.pathsep.join(path),
        "TOKENIZERS_PARALLELISM": "false",
        # torch warns about the names of collectives that DeepSpeed calls, once per rank.
        "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "ignore::FutureWarning:torch.distributed.c10d_logger"),
        **ops.environment(),
    }
    if not gpus:
        threads = max(1, (os.cpu_count() or 1) // ranks)
        extra |= {
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
            # glibc keeps freed memory per thread: with two arenas a rank of `tiny` peaks 3% lower.
            "MALLOC_ARENA_MAX": os.environ.get("MALLOC_ARENA_MAX", "2"),
        }
    return os.environ | extra


def record(folder: RunFolder, command: list[str] | None = None) -> None:
    """Add to the run's command.txt what was typed, and show and add the DeepSpeed launcher's command."""
    lines = [redact(shlex.join([sys.executable, *sys.argv]))]
    if command:
        lines.append(shlex.join(command))
        print(lines[-1], flush=True)
    with folder.command.open("a", encoding="utf-8") as log:
        log.write("".join(f"{line}\n" for line in lines))
