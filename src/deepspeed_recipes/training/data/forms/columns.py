"""Renames columns to the fields of the forms: `data.columns=question:prompt,answer:completion`.

Standard library only.
"""

import re
from collections.abc import Iterable, Iterator, Mapping

from ....recipe.errors import UserError
from .formats import FIELDS
from .turns import Example, fields_of


def fields(text: str | None) -> dict[str, str]:
    """Return the field of each column in `data.columns`; a column's name may contain any character.

    Raises:
        UserError: not in the form column:field, or a field that nothing reads.
    """
    if text is None:
        return {}
    pairs = re.findall(rf"(.+?):({'|'.join(FIELDS)})(?:,|$)", text)
    if ",".join(f"{column}:{field}" for column, field in pairs) != text:
        raise UserError(
            f"data.columns={text}: write COLUMN:FIELD, several with commas (question:prompt,answer:completion); "
            f"the fields are {', '.join(FIELDS)}."
        )
    return dict(pairs)


def renamed(located: Iterable[tuple[str, Example]], columns: Mapping[str, str]) -> Iterator[tuple[str, Example]]:
    """Yield the examples of one source with the columns renamed that `fields` lists.

    Raises:
        UserError: the first example has no such column.
    """
    for number, (where, example) in enumerate(located):
        missing = [column for column in columns if column not in example]
        if missing and not number:
            raise UserError(f"{where}: data.columns names {missing[0]!r}; this example has {fields_of(example)}.")
        kept = {name: value for name, value in example.items() if name in columns or name not in columns.values()}
        yield where, {columns.get(name, name): value for name, value in kept.items()}
