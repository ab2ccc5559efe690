"""The trials of a sweep: all combinations of the listed values, or a random selection."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from ...recipe import overrides
from ...recipe.errors import UserError, redact


@dataclass(frozen=True)
class Space:
    """The varied keys, and the settings that all trials share."""

    lists: dict[str, tuple[str, ...]]
    """Values by key, as typed; at least two each."""
    ranges: dict[str, tuple[str, str]]
    """Lowest and highest value by key, for random trials."""
    fixed: tuple[str, ...]
    """`key=value` words that all trials share."""

    @property
    def keys(self) -> list[str]:
        """The keys that differ between trials."""
        return [*self.lists, *self.ranges]


def read(words: Sequence[str]) -> Space:
    """Return the space that `key=value`, `key=value,value` and `key=lowest..highest` describe.

    Raises:
        UserError: an unknown key, a value of the wrong type, a list with one value, or nothing to vary.
    """
    known, with_commas = overrides.override_keys(), overrides.comma_keys()
    lists: dict[str, tuple[str, ...]] = {}
    ranges: dict[str, tuple[str, str]] = {}
    fixed: list[str] = []
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise UserError(
                f"{redact(word)!r} is not an override; write key=value,value, e.g. learning_rate=1e-4,3e-4."
            )
        if key not in known:
            raise UserError(overrides.unknown(key, list(known)))
        if key in lists or key in ranges or any(one.startswith(f"{key}=") for one in fixed):
            raise UserError(f"{key} is given twice; list all its values at once: {key}=VALUE,VALUE.")
        lowest, dots, highest = text.partition("..")
        comma = ";" if key in with_commas else ","
        if dots and _is_number(lowest) and _is_number(highest):
            ranges[key] = _range(key, lowest, highest, known[key])
        elif comma in text:
            lists[key] = _list(key, text, comma, known[key])
        else:
            overrides.parse(key, text, known[key])
            fixed.append(word)
    if not lists and not ranges:
        raise UserError("nothing to sweep over: list the values of a key, e.g. learning_rate=1e-4,3e-4,1e-3.")
    return Space(lists, ranges, tuple(fixed))


def _list(key: str, text: str, comma: str, hint: object) -> tuple[str, ...]:
    values = tuple(value.strip() for value in text.split(comma) if value.strip())
    parsed = [overrides.parse(key, value, hint) for value in values]
    if len(values) < 2:
        raise UserError(f"{key}={redact(text)}: has only one value; list at least two, or leave the {comma!r} out.")
    for at, value in enumerate(parsed):
        if value in parsed[:at]:
            raise UserError(f"{key}={redact(text)}: {values[at]} is listed twice.")
    return values


def _range(key: str, lowest: str, highest: str, hint: object) -> tuple[str, str]:
    low, high = (overrides.parse(key, text, hint) for text in (lowest, highest))
    if not isinstance(low, int | float) or isinstance(low, bool) or low >= high:
        raise UserError(f"{key}={lowest}..{highest}: a range goes from a lower to a higher number.")
    return lowest, highest


def grid(space: Space, most: int) -> list[list[str]]:
    """Return the overrides of every combination, in the order in which the values are listed.

    Raises:
        UserError: there are more than `most`, or a key has a range, which a grid cannot enumerate.
    """
    if space.ranges:
        key, (low, high) = next(iter(space.ranges.items()))
        raise UserError(f"{key}={low}..{high}: a range needs --random N; a grid needs a list of values.")
    count = math.prod(map(len, space.lists.values()))
    if count > most:
        sizes = " x ".join(f"{len(values)} of {key}" for key, values in space.lists.items())
        raise UserError(
            f"{count} trials ({sizes}) are more than {most}: list fewer values, try some with --random {most}, or "
            f"allow all with --most {count}."
        )
    pairs = [[f"{key}={value}" for value in values] for key, values in space.lists.items()]
    return [list(trial) for trial in itertools.product(*pairs)]


def at_random(space: Space, count: int, seed: int, most: int) -> list[list[str]]:
    """Return `count` different combinations, the same for the same seed.

    Values from a range above 0 are uniform on a log scale, since learning rates differ by factors. Whole numbers stay
    whole.

    Raises:
        UserError: `count` is below two, above `most`, or larger than the number of different combinations.
    """
    if count < 2:
        raise UserError(f"--random {count}: must be at least 2.")
    if count > most:
        raise UserError(f"--random {count}: more than {most} trials; allow them with --most {count}.")
    found: dict[tuple[str, ...], None] = {}
    chance = random.Random(seed)
    for _ in range(100 * count):
        trial = [f"{key}={chance.choice(values)}" for key, values in space.lists.items()]
        trial += [f"{key}={_drawn(chance, *ends)}" for key, ends in space.ranges.items()]
        found[tuple(trial)] = None
        if len(found) == count:
            return [list(trial) for trial in found]
    raise UserError(
        f"--random {count}: there are only {len(found)} different trials; list more values, or use --random "
        f"{max(2, len(found))}."
    )


def _drawn(chance: random.Random, lowest: str, highest: str) -> str:
    low, high = float(lowest), float(highest)
    value = math.exp(chance.uniform(math.log(low), math.log(high))) if low > 0 else chance.uniform(low, high)
    return str(round(value)) if lowest.isdigit() and highest.isdigit() else f"{value:.3g}"


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
