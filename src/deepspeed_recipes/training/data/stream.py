"""A dataset that is read during training: endless, shuffled again on every pass."""

from collections.abc import Iterator
from typing import Any

from datasets import IterableDataset
from torch.utils.data import IterableDataset as TorchIterableDataset

from ...recipe.errors import UserError


class Stream(TorchIterableDataset):
    """Endless sequences, shuffled again on every pass.

    Every rank reads all of them and accelerate picks its batches, so that all ranks get equally many. If accelerate got
    a dataset of `datasets`, it would assign whole files to ranks, and some ranks would finish before others.
    """

    def __init__(self, sequences: IterableDataset, if_empty: str) -> None:
        """`if_empty` is the error message if there are no sequences."""
        self.sequences = sequences
        self.if_empty = if_empty

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield sequences in the form of `tokenize.tokenized`."""
        found, epoch = True, 0
        while found:
            found = False
            self.sequences.set_epoch(epoch)
            for sequence in self.sequences:
                found = True
                yield sequence
            epoch += 1
        raise UserError(self.if_empty)
