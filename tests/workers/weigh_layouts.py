"""A run that weighs, before its export, what its rank holds of model and optimizer; executed on every rank."""

import json
from collections.abc import Iterable
from typing import Any

import torch

from recipes.training import export, run


def main(folder: str) -> None:
    """Train, and say the bytes."""
    save = export.save

    def weigh_and_save(trainer: Any, target: Any) -> None:
        engine = trainer.deepspeed
        inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        states = [value for state in inner.state.values() for value in state.values() if torch.is_tensor(value)]
        masters = [p for group in inner.param_groups for p in group["params"]]
        parameters = list(engine.module.parameters())
        print(
            json.dumps({"parameters": weight(parameters), "all": weight([*parameters, *states, *masters])}), flush=True
        )
        save(trainer, target)

    export.save = weigh_and_save
    run.main(folder)


def weight(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of what the tensors are views of, each storage once."""
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())
