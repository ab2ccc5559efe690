"""Trains as if each rank had a GPU that NVML knows; the module that answers for NVML is `tests/nvml/pynvml.py`."""

import os
import socket
import sys
from functools import partial
from pathlib import Path

from deepspeed_recipes.training import distributed, run
from deepspeed_recipes.training.callbacks import system_log


def main(folder: str, failing: str) -> None:
    """Train what `folder`/recipe.json says, where NVML fails at `failing`; a sample every tenth of a second."""
    os.environ["NVML_FAILS"] = failing
    sys.path.insert(0, str(Path(__file__).parents[1] / "nvml"))
    distributed.gpu_uuid = partial(f"GPU-{os.environ['RANK']}".format)
    system_log.SECONDS = 0.1
    run.main(folder)


def on_two_nodes(folder: str) -> None:
    """Train as if each rank had a node of its own, which all rank processes can tell by name only."""
    os.environ["LOCAL_RANK"] = "0"
    own = f"node-{os.environ['RANK']}"
    socket.gethostname = lambda: own
    main(folder, "")
