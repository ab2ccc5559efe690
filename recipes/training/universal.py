"""A checkpoint for another number of ranks: DeepSpeed's universal form, made before any rank starts.

Under ZeRO 1 to 3 each rank writes its own share of the optimizer's states, so N files fit N ranks only. The universal
form has one file per weight and state, and any number of ranks takes its shares from it. Standard library only: the
launcher refuses what cannot be converted in milliseconds, and the conversion is a process of its own.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from recipes.spec.errors import UserError
from recipes.spec.run_folder import COMPLETE, RunFolder, newest_checkpoint, read_json
from recipes.training.preflight import check_disk

MARKER = "latest_universal"
"""Written by DeepSpeed last of all, into the checkpoint: names the folder of the whole universal form."""


def is_needed(run: RunFolder, world_size: int) -> bool:
    """Return whether `world_size` ranks can only go on with the run's newest checkpoint in its universal form."""
    checkpoint = newest_checkpoint(run)
    if checkpoint is None or not zero_stage(read_json(run.deepspeed)):
        return False
    return read_json(checkpoint / COMPLETE)["world_size"] != world_size


def loading(config: dict[str, Any], run: RunFolder, world_size: int) -> dict[str, Any]:
    """Return the DeepSpeed configuration, told to load the universal form where these ranks need it."""
    if not is_needed(run, world_size):
        return config
    return config | {"checkpoint": config.get("checkpoint", {}) | {"load_universal": True}}


def zero_stage(config: dict[str, Any]) -> int:
    """Return the ZeRO stage of a resolved DeepSpeed configuration."""
    return config["zero_optimization"]["stage"]


def convert(checkpoint: Path) -> None:
    """Write the universal form into `checkpoint`, in one process; nothing where it is there already.

    Raises:
        UserError: no room on the disk, or DeepSpeed could not convert it.
    """
    if (checkpoint / MARKER).exists():
        return
    source = checkpoint / (checkpoint / "latest").read_text(encoding="utf-8").strip()
    target = source.with_name(source.name + "_universal")
    shutil.rmtree(target, ignore_errors=True)
    check_disk(checkpoint, room(source), "its form for another number of ranks")
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", str(source), "--output_folder", str(target)]
    # One worker each: with several DeepSpeed holds as many shares in memory at once.
    command += ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        shutil.rmtree(target, ignore_errors=True)
        reason = done.stderr.strip().rpartition("\n")[2]
        written_by = read_json(checkpoint / COMPLETE)["world_size"]
        raise UserError(f"{checkpoint}: DeepSpeed cannot convert it: {reason}\nUse --gpus {written_by}.")


def room(source: Path) -> int:
    """Return the bytes that converting DeepSpeed's folder `source` needs at most.

    The states stand there twice, cut to pieces and put together; ZeRO-3 keeps one rank's file besides, and ZeRO-1 and 2
    write in fp32 what only the module's 16-bit state holds.
    """
    states = [file.stat().st_size for file in source.glob("*_optim_states.pt")]
    weights = [file.stat().st_size for file in source.glob("*_model_states.pt")]
    return int(1.1 * (2 * sum(states) + max(states, default=0) + 3 * sum(weights)))
