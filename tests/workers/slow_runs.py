"""Runs that are slow in one way on purpose, with a profile."""

import time
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from deepspeed_recipes.training import run
from deepspeed_recipes.training.methods import sft

SECONDS = 0.5
"""Lost in every micro-batch or update: several times what a step of the small model takes."""


def of_a_run(folder: str, mistake: str) -> None:
    """Train what `folder`/recipe.json says, slowly."""
    build = sft.trainer

    def slowed(*arguments: Any) -> Any:
        trainer = build(*arguments)
        MISTAKES[mistake](trainer)
        return trainer

    sft.trainer = slowed
    run.main(folder)


def slow_loader(trainer: Any) -> None:
    """Wait for the batches of the recorded steps, as for a slow disk."""
    collate, batches = trainer.data_collator, count(1)

    def slowly(examples: Any) -> Any:
        time.sleep(2 * SECONDS if next(batches) > 4 else 0)
        return collate(examples)

    trainer.data_collator = slowly


def slow_rank(trainer: Any, rank: int = 1) -> None:
    """Compute more on rank 1 than on the others."""
    if dist.get_rank() == rank:
        trainer.model.register_forward_pre_hook(lambda *_: multiply())


def slow_first_rank(trainer: Any) -> None:
    """Compute more on rank 0 than on the others."""
    slow_rank(trainer, 0)


def slow_optimizer(trainer: Any) -> None:
    """Give an optimizer on the host more to do, outside of torch's operators, as DeepSpeed's CPUAdam."""
    register_optimizer_step_pre_hook(lambda *_: spin())


def multiply() -> None:
    """Compute for a while."""
    matrix, end = torch.ones(256, 256), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        matrix = (matrix @ matrix).clamp(max=1)


def spin() -> None:
    """Keep the processor busy for a while."""
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        pass


MISTAKES = {one.__name__: one for one in (slow_loader, slow_rank, slow_first_rank, slow_optimizer)}
