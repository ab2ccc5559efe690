"""Which steps and ranks a run records, and how much room their traces take."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from ...recipe.errors import UserError

AUTO = "auto"
FIRST, LAST = 4, 6
"""Recorded by default. ZeRO-3 finds the order of its fetches in step 1; step 2 still makes buffers; step 3 is there to
be compared with."""
RAW_BYTES = 700_000
"""Of a trace as torch writes it, per layer and micro-batch, forward and backward: 24 MB for 4 layers and 8
micro-batches of `tiny full` under ZeRO-3, 140 MB for twice as many with `layout.sequence=2` (torch 2.13.0, two CPU
ranks)."""
PACKED = 15
"""How many times smaller it is compressed, of the same traces."""


def words(arguments: Sequence[str]) -> list[str]:
    """Return the command line with a value for every `--profile`, which may stand before a recipe or a key=value."""
    found = []
    for at, word in enumerate(arguments):
        following = arguments[at + 1] if at + 1 < len(arguments) else ""
        bare = word == "--profile" and not re.match(r"-?\d|:", following)
        found.append(f"--profile={AUTO}" if bare else word)
    return found


def parse(steps: str, last_step: int | None) -> tuple[int, int]:
    """Return the first and the last step of `FIRST:LAST`, of one step, or of `auto`.

    Args:
        steps: as it was asked for.
        last_step: of the run; None where only the ranks will know.

    Raises:
        UserError: not two steps in order, or not of this run.
    """
    if steps == AUTO:
        return (FIRST, LAST) if last_step is None else (min(FIRST, last_step), min(LAST, last_step))
    match = re.fullmatch(r"(\d+)(?::(\d+))?", steps)
    if match is None:
        raise UserError(f"--profile {steps}: not FIRST:LAST; give the first and the last step, e.g. --profile 10:12.")
    first, last = int(match[1]), int(match[2] or match[1])
    if not 1 <= first <= last:
        why = "steps are counted from 1" if first < 1 else "the last step comes before the first"
        raise UserError(f"--profile {steps}: {why}; e.g. --profile {max(1, min(first, last))}:{max(1, first, last)}.")
    if last_step is not None and last > last_step:
        room = f"{max(1, last_step - (last - first))}:{last_step}"
        raise UserError(
            f"--profile {steps}: the run has {last_step} steps; e.g. --profile {room}, or a larger max_steps."
        )
    return first, last


def ranks(asked: str, count: int, per_host: int) -> tuple[int, ...]:
    """Return the ranks that record.

    Args:
        asked: `all`, numbers with commas, or `auto`: all ranks of one host, the first of each of several.
        count: of the run's ranks.
        per_host: ranks on each host.

    Raises:
        UserError: names a rank that does not exist.
    """
    if asked == "all" or (asked == AUTO and per_host >= count):
        return tuple(range(count))
    if asked == AUTO:
        return tuple(range(0, count, per_host))
    found = []
    for word in asked.split(","):
        if not word.strip().isdecimal():
            raise UserError(f"profile.ranks={asked}: `{word}` is not a rank; give numbers with commas (0,1), or all.")
        found.append(int(word))
        if found[-1] >= count:
            raise UserError(f"profile.ranks={asked}: there is no rank {found[-1]}; the run has ranks 0 to {count - 1}.")
    return tuple(sorted(set(found)))


def room(folder: Path, layers: int, micro_batches: int, steps: int, traces: int) -> str:
    """Return a line that says what the traces will need.

    Args:
        folder: the run's, which need not exist.
        layers: of the model.
        micro_batches: per step and rank.
        steps: recorded.
        traces: ranks that record.

    Raises:
        UserError: the disk has less.
    """
    raw = RAW_BYTES * (layers + 1) * micro_batches * steps * traces
    free = shutil.disk_usage(next(one for one in (folder, *folder.parents) if one.exists())).free
    if raw > free:
        raise UserError(
            f"--profile: the traces need about {size(raw)} while they are written, and {folder} has {size(free)} left; "
            "record fewer steps (--profile 4:4) or ranks (profile.ranks=0)."
        )
    return f"the traces need about {size(raw)} while they are written and {size(raw / PACKED)} then"


def described(first: int, last: int) -> str:
    """Return `steps 4 to 6`."""
    return f"step {first}" if first == last else f"steps {first} to {last}"


def count(number: int, what: str) -> str:
    """Return `1 rank`, `2 ranks`."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def size(count: float) -> str:
    """Return bytes in MB, or in GB where that is shorter."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{max(1, count / 1e6):.0f} MB"
