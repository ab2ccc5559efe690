"""Runs whose loss is computed with a mistake on purpose."""

from typing import Any

import torch
import torch.distributed as dist

from recipes.spec.run_folder import RunFolder, read_jsonl
from recipes.training import run
from recipes.training.methods import classify, embed


def loss_of_transformers(folder: str) -> None:
    """Train a classifier with the loss that transformers' model and Trainer compute."""

    def __init__(self: Any, context: Any, *, class_weights: Any, **options: Any) -> None:
        super(classify.RunClassificationTrainer, self).__init__(context, **options)

    classify.RunClassificationTrainer.__init__ = __init__
    run.main(folder)


def constant_texts(folder: str) -> None:
    """Train embeddings with a gather through which no gradient flows back."""

    def gathered(vectors: torch.Tensor) -> list[torch.Tensor]:
        every = [torch.empty_like(vectors) for _ in range(dist.get_world_size())]
        dist.all_gather(every, vectors.detach().contiguous())
        every[dist.get_rank()] = vectors
        return every

    embed.all_gather = gathered
    run.main(folder)


def first_loss(folder: RunFolder) -> float:
    """Return the loss of a run's first step."""
    return float(read_jsonl(folder.metrics)[0]["loss"])
