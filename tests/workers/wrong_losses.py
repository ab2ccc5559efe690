"""Runs whose loss is computed with a mistake on purpose."""

from typing import Any

import torch
import torch.distributed as dist

from deepspeed_recipes.recipe.run_folder import RunFolder, read_jsonl
from deepspeed_recipes.training import run
from deepspeed_recipes.training.methods import classify, embed


def loss_of_transformers(folder: str) -> None:
    """Train a classifier with the loss that transformers' model and Trainer compute."""

    def __init__(self: Any, context: Any, *, class_weights: Any, **options: Any) -> None:
        super(classify.RunClassificationTrainer, self).__init__(context, **options)

    classify.RunClassificationTrainer.__init__ = __init__
    run.main(folder)


def constant_texts(folder: str) -> None:
    """Train embeddings with a gather through which no gradient flows back to the other ranks."""
    embed.Gathered = Constant
    run.main(folder)


class Constant(embed.Gathered):
    """A gather whose gradients are those of this rank's loss alone."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Return this rank's part."""
        return gradients[0].chunk(dist.get_world_size())[dist.get_rank()]


def first_loss(folder: RunFolder) -> float:
    """Return the loss of a run's first step."""
    return float(read_jsonl(folder.metrics)[0]["loss"])
