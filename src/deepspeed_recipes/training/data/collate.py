"""Collates packed or single sequences into the model's inputs, and numbers them, to name those that spoil a step."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.utils.data import BatchSampler, IterableDataset, Sampler

from ...recipe.errors import UserError, counted
from ...recipe.files import Json
from ...recipe.run_folder import RunFolder, read_json, write_json
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


def padded(sequences: Sequence[Sequence[int]], pad_token_id: int, multiple: int = 1) -> Batch:
    """Return whole texts as `input_ids` and `attention_mask`, [texts, longest] each, and two plain counts.

    Padding follows the tokens, to a `multiple` of their number; its id may also be that of a token.
    """
    lengths = [len(sequence) for sequence in sequences]
    width = -(-max(lengths) // multiple) * multiple
    ids = rows(sequences, width, pad_token_id)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
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
        spans: list[list[int]] = [np.repeat(one, one).tolist() for one in lengths] if self.document_lengths else []
        stretched = [[*one[:-1], width - sum(one[:-1])] for one in lengths]
        return {
            "input_ids": rows([sequence["input_ids"] for sequence in sequences], width, self.pad_token_id),
            "labels": labels,
            "position_ids": torch.stack([torch.cat([torch.arange(length) for length in one]) for one in stretched]),
            "tokens": sum(len(sequence["input_ids"]) for sequence in sequences),
            "squared_lengths": sum(length**2 for one in lengths for length in one),
            **(attention.document_boundaries(lengths, width) if self.boundaries else {}),
            **({"document_lengths": rows(spans, width, 0)} if self.document_lengths else {}),
            **(labelled_only(next_labels(labels)) if self.labelled else {}),
        }


def next_labels(labels: torch.Tensor) -> torch.Tensor:
    """Return the label of the token after each position, [sequences, length]; the last position has none."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def labelled_only(following: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the labelled tokens and their labels; with a mask, a device would have to wait for their number.

    The result has `labelled`, the numbers of these tokens when all sequences are concatenated, [places], and
    `shift_labels`, [1, places]. Unless all tokens are labelled, the number of places is a multiple of `STEP`, padded
    with the first unlabelled token.
    """
    labels = following.flatten()
    others = labels == IGNORED
    places = (~others).nonzero()[:, 0]
    if others.any():
        count = -(-max(1, len(places)) // STEP) * STEP
        places = torch.nn.functional.pad(places, (0, count - len(places)), value=int(others.nonzero()[0]))
    return {"labelled": places, "shift_labels": labels[places][None]}


KEY = "number"
"""Key of a sequence's number in the training data, from 0; in a batch, the list of its sequences' numbers."""
FILLER = "filler"
"""Key of a micro-batch without effect, which a rank gets where an epoch has none left for it."""


def numbered(dataset: Dataset, run: RunFolder) -> Dataset:
    """Return the dataset with a number in every sequence, without the sequences that the run has found to be bad.

    A stream stays as it is: its sequences have no numbers.
    """
    if isinstance(dataset, IterableDataset):
        return dataset
    bad = frozenset(left_out(run))
    if len(bad) >= len(dataset):
        raise UserError(f"{run.left_out}: lists every training sequence, so the data is not the cause.")
    if bad:
        from ..console import say  # which imports DeepSpeed; the launcher tries the user's code without it

        say(
            f"not trained on: {counted(len(bad), 'sequence')} that a rewind has found to be bad, by number in "
            f"{run.left_out}; remove that file if the data has changed since"
        )
    return Numbered(dataset, bad)


def left_out(run: RunFolder) -> list[int]:
    """Return the numbers of the sequences that are not trained on."""
    return read_json(run.left_out, [])


def leave_out(run: RunFolder, numbers: Sequence[int]) -> None:
    """Exclude sequences from the next start of the run."""
    write_json(run.left_out, sorted({*left_out(run), *numbers}))


@dataclass(frozen=True)
class Numbered:
    """A dataset whose sequences have numbers; an excluded sequence is replaced by the next one that is not excluded.

    This keeps the order of the others, and so the place where a checkpoint resumes.
    """

    sequences: Dataset
    bad: frozenset[int]

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, number: int) -> Json:
        """Return a sequence with its number; that of a filler is the complement of one."""
        if number < 0:
            return {**self[~number], FILLER: True}
        while number in self.bad:
            number = (number + 1) % len(self.sequences)
        return {**self.sequences[number], KEY: number}


class EvenBatches(BatchSampler):
    """The micro-batches of an epoch, and fillers until every rank has equally many; the last may be smaller.

    accelerate would repeat the first sequences of the epoch instead, so that they would count twice.
    """

    def __init__(self, sampler: Sampler[int], batch_size: int, ranks: int) -> None:
        """`ranks`: how many share the micro-batches."""
        super().__init__(sampler, batch_size, drop_last=False)
        self.ranks = ranks

    def __len__(self) -> int:
        return -(-super().__len__() // self.ranks) * self.ranks

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the numbers of each micro-batch."""
        yield from super().__iter__()
        for _ in range(len(self) - super().__len__()):
            yield [~0]


def filler(batch: Batch) -> Json:
    """Return a micro-batch that counts neither in the loss nor in the metrics, marked with `FILLER`."""
    found = {**batch, FILLER: True}
    found |= {name: torch.full_like(batch[name], IGNORED) for name in ("labels", "shift_labels") if name in batch}
    found |= {name: 0 for name in ("tokens", "squared_lengths") if name in batch}
    return found


@dataclass(frozen=True)
class WithNumbers:
    """Adds the sequences' numbers to the batches of another collator, and makes fillers of those that are."""

    collator: Callable[..., Json]

    def __call__(self, sequences: Sequence[Json]) -> Batch:
        """Return the collator's batch with the numbers of its sequences."""
        bare = [
            {name: value for name, value in sequence.items() if name not in (KEY, FILLER)} for sequence in sequences
        ]
        batch = self.collator(bare) | {KEY: [sequence[KEY] for sequence in sequences if KEY in sequence]}
        return filler(batch) if FILLER in sequences[0] else batch
