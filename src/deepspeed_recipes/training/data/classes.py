"""Checks that concern all examples of labelled or matching texts together; standard library only.

The launcher checks the files that it can read, the ranks check all data.
"""

import re
from collections.abc import Collection, Iterable, Mapping

from ...recipe.errors import UserError, counted

SHOWN = 5
"""Maximum number of class names in a message."""


def ordered(names: Iterable[str]) -> list[str]:
    """Return the names of classes in the order of the model's outputs: by number if all are numbers, else by name."""
    found = sorted(set(names))
    return sorted(found, key=int) if all(re.fullmatch(r"-?\d{1,18}", name) for name in found) else found


def check(key: str, counts: Mapping[str, int]) -> None:
    """Refuse labels of only one class, or with no two examples of any; `key` names the data."""
    total = sum(counts.values())
    if len(counts) == 1:
        (name,) = counts
        raise UserError(f"{key}: all {total} examples have the label {name!r}; add examples of another class.")
    if max(counts.values()) == 1:
        raise UserError(
            f"{key}: {total} examples have {total} different labels, so these are not classes; name the column that "
            "holds the class: data.columns=COLUMN:label."
        )


def check_known(key: str, names: Iterable[str], known: Collection[str], where: str = "the training data") -> None:
    """Refuse classes that the model will not have."""
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise UserError(
            f"{key}: the label {shown(unknown)} is not among those of {where} ({shown(ordered(known))}); correct the "
            "label, or remove these examples."
        )


def shown(names: Collection[str]) -> str:
    """Return the first names of a list, for messages."""
    listed = ", ".join(map(repr, list(names)[:SHOWN]))
    return listed if len(names) <= SHOWN else f"{listed} and {len(names) - SHOWN} more"


def check_pairs(key: str, pairs: int, global_batch_size: int) -> None:
    """Refuse fewer pairs of texts than a batch has: an anchor learns from the others' texts."""
    if pairs < max(2, global_batch_size):
        fix = (
            f"set global_batch_size and micro_batch_size to at most {pairs}, or add pairs" if pairs > 1 else "add pairs"
        )
        raise UserError(
            f"{key}: {pairs} {'pair' if pairs == 1 else 'pairs'}, fewer than global_batch_size={global_batch_size}; "
            f"the other pairs of a batch serve as negatives: {fix}."
        )


def check_negatives(key: str, examples: Mapping[int, int]) -> None:
    """Refuse pairs with unequally many negatives: ranks could not exchange batches of different sizes.

    `examples` are the numbers of examples by their number of negatives.
    """
    if len(examples) > 1:
        found = ", ".join(f"{count} with {counted(each, 'negative')}" for each, count in sorted(examples.items()))
        raise UserError(
            f"{key} has examples {found}; give equally many to all of them, or none (the other pairs of a batch are "
            "negatives too)."
        )
