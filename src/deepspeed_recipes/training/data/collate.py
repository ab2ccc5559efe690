"""Collates packed or single sequences into the model's inputs: padding, labels, positions, document boundaries."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..model import attention

Batch = dict[str, Any]
"""The model's inputs, as tensors, with the counts and marks that only the trainer reads."""
IGNORED = -100
"""Label of a token that is excluded from the loss (PyTorch's `ignore_index`)."""
STEP = 256
"""The number of labelled tokens is padded to a multiple of it: a GPU's allocator reuses blocks of equal size."""


def rows(lists: Sequence[Sequence[int]], width: int, value: int) -> torch.Tensor:
    """Return lists of numbers as the rows of a matrix, [lists, width], filled up with `value`."""
    filled = torch.full((len(lists), width), value)
    for index, numbers in enumerate(lists):
        filled[index, : len(numbers)] = torch.as_tensor(numbers)
    return filled


def padded(sequences: Sequence[Sequence[int]], pad_token_id: int) -> Batch:
    """Return whole texts as `input_ids` and `attention_mask`, [texts, longest] each, and two plain counts.

    Padding follows the tokens; its id may also be that of a token.
    """
    lengths = [len(sequence) for sequence in sequences]
    ids = rows(sequences, max(lengths), pad_token_id)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    counts = {"tokens": sum(lengths), "squared_lengths": sum(length**2 for length in lengths)}
    return {"input_ids": ids, "attention_mask": mask, **counts}


@dataclass(frozen=True)
class Collator:
    """Collates sequences of documents into the model's inputs.

    Position ids restart at every document and there is no attention mask: transformers infers the documents' boundaries
    from the position ids. Padding continues the positions of a sequence's last document; the causal mask hides it from
    the document, and its labels exclude it from the loss.
    """

    pad_token_id: int
    multiple: int = 8
    boundaries: bool = False
    """Also return the boundaries of documents, for attention implementations that need them."""
    document_lengths: bool = False
    """Also return the length of each token's document, [sequences, longest]; 0 for padding."""
    labelled: bool = False
    """Also return `labelled_only`."""

    def __call__(self, sequences: Sequence[Batch]) -> Batch:
        """Return `input_ids`, `labels`, `position_ids`, each [sequences, longest], and two plain counts."""
        longest = max(len(sequence["input_ids"]) for sequence in sequences)
        width = -(-longest // self.multiple) * self.multiple
        lengths = [sequence["seq_lengths"] for sequence in sequences]
        labels = rows([sequence["labels"] for sequence in sequences], width, IGNORED)
        return {
            "input_ids": rows([sequence["input_ids"] for sequence in sequences], width, self.pad_token_id),
            "labels": labels,
            "position_ids": torch.stack([_positions(one, width) for one in lengths]),
            "tokens": sum(len(sequence["input_ids"]) for sequence in sequences),
            "squared_lengths": sum(length**2 for one in lengths for length in one),
            **(attention.document_boundaries(lengths, width) if self.boundaries else {}),
            **(
                {"document_lengths": torch.stack([_repeated(one, width) for one in lengths])}
                if self.document_lengths
                else {}
            ),
            **(labelled_only(next_labels(labels)) if self.labelled else {}),
        }


def next_labels(labels: torch.Tensor) -> torch.Tensor:
    """Return the label of the token after each position, [sequences, length]; the last position has none."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def labelled_only(following: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the labelled tokens and their labels; with a mask, a device would have to wait for their number.

    Args:
        following: the result of `next_labels`.

    Returns:
        `labelled`, the numbers of these tokens when all sequences are concatenated, [places], and `shift_labels`,
        [1, places]. Unless all tokens are labelled, the number of places is a multiple of `STEP`, padded with the
        first unlabelled token.
    """
    labels = following.flatten()
    others = labels == IGNORED
    places = (~others).nonzero()[:, 0]
    if others.any():
        count = -(-max(1, len(places)) // STEP) * STEP
        places = torch.nn.functional.pad(places, (0, count - len(places)), value=int(others.nonzero()[0]))
    return {"labelled": places, "shift_labels": labels[places][None]}


def _positions(lengths: Sequence[int], width: int) -> torch.Tensor:
    lengths = [*lengths[:-1], width - sum(lengths[:-1])]
    return torch.cat([torch.arange(length) for length in lengths])


def _repeated(lengths: Sequence[int], width: int) -> torch.Tensor:
    counts = torch.tensor([*lengths, width - sum(lengths)])
    return torch.tensor([*lengths, 0]).repeat_interleave(counts)
