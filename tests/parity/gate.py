"""The parity gate: trains a recipe and compares it with the same training in plain PyTorch."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from deepspeed_recipes.prove.techniques import of_settings as recipe_for
from deepspeed_recipes.recipe.recipe import Recipe
from deepspeed_recipes.recipe.run_folder import RunFolder, forget_after, read_jsonl
from deepspeed_recipes.training import run as training_run
from tests.parity import plain
from tests.ranks import run_on

__all__ = ["recipe_for"]

LOSS = 1e-5
"""fp32 sums in another order differ by less."""
NORM = 1e-4
"""PyTorch's own norm of a gradient as large as an embedding's, in fp32, is 8e-6 off that in fp64."""


def run_with_a_break(
    ranks: Any,
    recipe: Recipe,
    folder: Path,
    world_size: int = 2,
    function: Callable[[str], None] = training_run.main,
) -> RunFolder:
    """Train a recipe that saves at step 3, and again from there, and return the run."""
    run = run_on(ranks, recipe, folder, world_size, function=function)
    resume(ranks, run, folder, world_size, function)
    return run


@dataclass(frozen=True)
class Reference:
    """What a library trained alone."""

    records: list[dict[str, float]]
    weights: dict
    events: list[tuple[str, int]] = field(default_factory=list)
    """What a callback has recorded."""


def resume(
    ranks: Any, run: RunFolder, log: Path, world_size: int = 2, function: Callable[[str], None] = training_run.main
) -> None:
    """Remove what a run did after step 3, and train it again from there."""
    forget_after(run, run.checkpoints / "checkpoint-3")
    shutil.rmtree(run.export)
    ranks.check(function, str(run.path), log=log / "resumed", world_size=world_size)


def agree(
    run: RunFolder, records: list[dict[str, float]], weights: dict[str, torch.Tensor], norms: float | None = NORM
) -> None:
    """Fail unless every loss, every gradient norm (up to a share) and the exported weights are the reference's.

    Without `norms` they are not compared.
    """
    agree_on_steps(run, records, norms)
    exported = AutoModelForCausalLM.from_pretrained(run.export, dtype=torch.float32).state_dict()
    assert set(exported) == set(weights)
    near(exported, weights)


def agree_on_adapters(run: RunFolder, records: list[dict[str, float]], weights: dict[str, torch.Tensor]) -> None:
    """Fail unless every loss, every gradient norm and the exported adapters are the reference's."""
    agree_on_steps(run, records)
    exported = load_file(run.export / "adapter_model.safetensors")
    assert len(exported) == sum("lora_" in name for name in weights)
    near({name.replace(".weight", ".default.weight"): weight for name, weight in exported.items()}, weights)


def near(exported: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> None:
    """Fail unless exported weights are the reference's."""
    for name, weight in exported.items():
        assert plain.worst(weight, weights[name]) <= 1, name


def agree_on_steps(run: RunFolder, records: list[dict[str, float]], norms: float | None = NORM) -> None:
    """Fail unless every loss and every gradient norm is the reference's."""
    logged = read_jsonl(run.metrics)
    assert [row["step"] for row in logged] == list(range(1, len(records) + 1))
    for ours, theirs in zip(logged, records, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=LOSS)
        assert norms is None or ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=norms)
