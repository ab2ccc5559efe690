"""Collates conversations with images: tokens padded on the right, images read and processed when they are needed."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from ...recipe.recipe import Recipe
from . import processor
from .answers import accepted_by
from .tokenize import IGNORED, read_all


@dataclass(frozen=True)
class PictureCollator:
    """Collates single conversations into the model's inputs.

    There are no position ids: models with two-dimensional positions in images compute them from the tokens.
    """

    seen: ProcessorMixin
    pad_token_id: int
    max_pixels: int
    accepted: Collection[str]
    """Names of the parameters of the model's `forward`."""
    multiple: int = 8

    @classmethod
    def of(cls, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, model: Any) -> "PictureCollator":
        """Return the collator of a run."""
        seen = processor.adopt(processor.of_recipe(recipe), tokenizer)
        return cls(seen, tokenizer.pad_token_id, recipe.data.max_pixels, accepted_by(model))

    def alone(self, sequence: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return the model's inputs for one sequence except its tokens, without padding."""
        inputs = replace(self, multiple=1)([sequence])
        return {name: value for name, value in inputs.items() if name not in _OF_TOKENS and torch.is_tensor(value)}

    def __call__(self, sequences: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return `input_ids`, `labels`, `attention_mask`, [sequences, longest], and the tower's inputs."""
        lengths = [len(one["input_ids"]) for one in sequences]
        width = -(-max(lengths) // self.multiple) * self.multiple
        ids = self._padded([one["input_ids"] for one in sequences], width, self.pad_token_id)
        pictures = [read_all(one["where"], one["images"], self.max_pixels) for one in sequences]
        return {
            "input_ids": ids,
            "labels": self._padded([one["labels"] for one in sequences], width, IGNORED),
            "attention_mask": (torch.arange(width) < torch.tensor(lengths)[:, None]).long(),
            **processor.token_types(self.seen, self.accepted, ids),
            **processor.for_tower(self.seen, pictures),
            "tokens": sum(lengths),
            "squared_lengths": sum(length**2 for length in lengths),
        }

    @staticmethod
    def _padded(lists: list[list[int]], width: int, value: int) -> torch.Tensor:
        return torch.tensor([[*one, *[value] * (width - len(one))] for one in lists])


_OF_TOKENS = ("input_ids", "labels", "attention_mask")
