"""Ranks on two hosts: forked on this machine, each enters its host's network namespace before it meets the others."""

import ctypes
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from deepspeed_recipes.benchmarks import probe
from deepspeed_recipes.recipe.run_folder import write_json
from deepspeed_recipes.training import distributed, run

NETWORK = 0x40000000
"""CLONE_NEWNET of setns(2), which Python has from 3.12 on."""


def main(folder: str, spaces: Sequence[str], address: str) -> None:
    """Train what `folder`/recipe.json says; the first half of the ranks is on the first host, whose `address` it is."""
    settle(spaces, address)
    run.main(folder)


def measure_link(file: str, spaces: Sequence[str], address: str) -> None:
    """Write the seconds per byte of an all-reduce, one rank on each host, to `file`."""
    settle(spaces, address)
    distributed.start()
    size = probe.sizes()["message"]
    seconds = probe.median_seconds(partial(dist.all_reduce, torch.ones(size // 4)))
    if distributed.is_first():
        write_json(Path(file), {"seconds_per_byte": seconds / size})
    distributed.stop()


def settle(spaces: Sequence[str], address: str) -> None:
    """Move this rank to its host."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    enter(spaces[rank * len(spaces) // world_size])
    os.environ |= {"MASTER_ADDR": address, "GLOO_SOCKET_IFNAME": "eth0"}


def enter(space: str) -> None:
    """Move this process, which has a single thread yet, into a network namespace."""
    with open(f"/var/run/netns/{space}") as file:
        library = ctypes.CDLL(None, use_errno=True)
        if library.setns(file.fileno(), NETWORK):
            raise OSError(ctypes.get_errno(), f"setns {space}")
