"""Rows that know their numbers, so that the ones that spoil a step can be named and left out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset
from transformers import Trainer

from recipes.spec.errors import UserError
from recipes.spec.run_folder import RunFolder, read_json, write_json

KEY = "row"
"""Of a row: its number in the training data, from 0. Of a batch: the list of its rows' numbers."""


def add(trainer: Trainer, run: RunFolder) -> None:
    """Make every training batch hold the numbers of its rows, and leave out what the run has found to be bad.

    A stream has no numbers: its batches hold empty lists.

    Raises:
        UserError: no row is left.
    """
    if not isinstance(trainer.train_dataset, IterableDataset):
        bad = frozenset(left_out(run))
        if len(bad) >= len(trainer.train_dataset):
            raise UserError(f"{run.left_out}: every row of the training data is left out; the data is not the cause.")
        trainer.train_dataset = Numbered(trainer.train_dataset, bad)
    trainer.data_collator = WithNumbers(trainer.data_collator)


def left_out(run: RunFolder) -> list[int]:
    """Return the rows that are not trained on."""
    return read_json(run.left_out) if run.left_out.exists() else []


def leave_out(run: RunFolder, numbers: Sequence[int]) -> None:
    """Leave rows out from the run's next start on."""
    write_json(run.left_out, sorted({*left_out(run), *numbers}))


@dataclass(frozen=True)
class Numbered:
    """A data set whose rows have numbers; in the place of one that is left out stands the next that is not.

    So the order of the others, and with it the place where a checkpoint goes on, stays what it was.
    """

    rows: Any
    bad: frozenset[int]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return a row with its number."""
        while number in self.bad:
            number = (number + 1) % len(self.rows)
        return {**self.rows[number], KEY: number}


@dataclass(frozen=True)
class WithNumbers:
    """A collator that hands the rows' numbers on."""

    collator: Callable[..., dict[str, Any]]

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return what the collator makes of the rows, and their numbers."""
        bare = [{name: value for name, value in row.items() if name != KEY} for row in rows]
        return self.collator(bare) | {KEY: [row[KEY] for row in rows if KEY in row]}
