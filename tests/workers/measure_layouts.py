"""A run that measures what its rank holds of model, gradients and optimizer; executed on every rank."""

import json
from collections.abc import Iterable
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from deepspeed_recipes.training import export, run


def main(folder: str) -> None:
    """Train, and print the bytes: of gradients when they are about to be reduced, of the rest before the export."""
    save, reduce = export.save, DeepSpeedEngine.allreduce_gradients
    gradients: list[int] = []

    def measure_and_reduce(engine: Any, *arguments: Any, **options: Any) -> None:
        # By their own sizes: some are views of the bucket that they will be reduced in.
        gradients.append(sum(one.grad.nbytes for one in engine.module.parameters() if one.grad is not None))
        reduce(engine, *arguments, **options)

    def measure_and_save(trainer: Any, target: Any, outline: Any) -> None:
        engine = trainer.deepspeed
        inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        states = [value for state in inner.state.values() for value in state.values() if torch.is_tensor(value)]
        masters = [p for group in inner.param_groups for p in group["params"]]
        parameters = list(engine.module.parameters())
        found = {"parameters": storage_bytes(parameters), "all": storage_bytes([*parameters, *states, *masters])}
        print(json.dumps({**found, "gradients": max(gradients)}), flush=True)
        save(trainer, target, outline)

    export.save, DeepSpeedEngine.allreduce_gradients = measure_and_save, measure_and_reduce
    run.main(folder)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages behind some tensors, each storage once."""
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())
