"""The ways in which ranks hold a model: whole or sharded (`whole.py`), or in the stages of a pipeline (`pipeline.py`).

Both call `tensor`, `sequence` and `expert`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from ...recipe.recipe import Layout, Recipe
from ..data.collate import Batch
from . import pipeline, whole


class Holding(Protocol):
    """Interface of the two modules that hold a model on the ranks of a layout; mypy compares them with it."""

    def check(self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, /) -> None:
        """Refuse a model that this module would train differently."""

    def load(self, recipe: Recipe, labels: Sequence[str] = (), /) -> torch.nn.Module:
        """Return this rank's model, ready for the Trainer; a classifier has `labels`."""

    def outline(self, recipe: Recipe, model: PreTrainedModel, /) -> PreTrainedModel | PeftModel:
        """Return a model to count parameters and operations on."""

    def step(
        self, trainer: Trainer, ordinary: Callable[..., torch.Tensor], inputs: Batch, items: object, /
    ) -> torch.Tensor:
        """Make the forward and backward pass of a micro-batch, and return its loss; `ordinary` is the Trainer's."""

    def logits(self, trainer: Trainer, tokens: torch.Tensor, **beside: torch.Tensor) -> torch.Tensor:
        """Return the logits of sequences, on every rank; `beside` has the model's inputs for images."""

    def measure(self, trainer: Trainer, sequences: Dataset, /) -> dict[str, float]:
        """Return the loss per token on held-out data, and other scores from the same passes."""

    def save(self, trainer: Trainer, folder: Path, /) -> None:
        """Write an ordinary Hugging Face folder, or a PEFT adapter."""


def implementation(layout: Layout) -> Holding:
    """Return the module for a layout: `whole` or `pipeline`."""
    if layout.pipeline > 1:  # not in one expression, whose type mypy would not compare
        return pipeline
    return whole
