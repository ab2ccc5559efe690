"""Numbers training sequences, so that those that spoil a step can be named and excluded; fills an epoch's last step."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from datasets import Dataset
from torch.utils.data import BatchSampler, IterableDataset, Sampler

from ...recipe.errors import UserError
from ...recipe.files import Json
from ...recipe.run_folder import RunFolder, read_json, write_json
from .collate import IGNORED, Batch

KEY = "number"
"""Key of a sequence's number in the training data, from 0; in a batch, the list of its sequences' numbers."""
FILLER = "filler"
"""Key of a micro-batch without effect, which a rank gets where an epoch has none left for it."""


def numbered(dataset: Dataset, run: RunFolder) -> Dataset:
    """Return the dataset with a number in every sequence, without the sequences that the run has found to be bad.

    A stream stays as it is: its sequences have no numbers.

    Raises:
        UserError: no sequence is left.
    """
    if isinstance(dataset, IterableDataset):
        return dataset
    bad = frozenset(left_out(run))
    if len(bad) >= len(dataset):
        raise UserError(f"{run.left_out}: lists every training sequence, so the data is not the cause.")
    return Numbered(dataset, bad)


def left_out(run: RunFolder) -> list[int]:
    """Return the numbers of the sequences that are not trained on."""
    return read_json(run.left_out) if run.left_out.exists() else []


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
