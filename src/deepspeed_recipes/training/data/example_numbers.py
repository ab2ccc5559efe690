"""Numbers training sequences, so that those that spoil a step can be named and excluded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from ...recipe.errors import UserError
from ...recipe.run_folder import RunFolder, read_json, write_json

KEY = "number"
"""Key of a sequence's number in the training data, from 0; in a batch, the list of its sequences' numbers."""


def numbered(dataset: Any, run: RunFolder) -> Any:
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

    sequences: Any
    bad: frozenset[int]

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return a sequence with its number."""
        while number in self.bad:
            number = (number + 1) % len(self.sequences)
        return {**self.sequences[number], KEY: number}


@dataclass(frozen=True)
class WithNumbers:
    """Adds the sequences' numbers to the batches of another collator."""

    collator: Callable[..., dict[str, Any]]

    def __call__(self, sequences: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the collator's batch with the numbers of its sequences."""
        bare = [{name: value for name, value in sequence.items() if name != KEY} for sequence in sequences]
        return self.collator(bare) | {KEY: [sequence[KEY] for sequence in sequences if KEY in sequence]}
