"""Why a run ended: which rank died first and of what, what it said last, and where the others were if it hung."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from recipes.spec.errors import redact
from recipes.spec.run_folder import REWIND, RunFolder, read_json

LAST_LINES = 8
"""Of a rank's log that are shown."""
TOLD = (0, 2, REWIND)
"""Exit statuses of ranks that need no explanation: done, or the reason is on the screen already."""
HUNG = "Timeout"
"""What the interpreter's watchdog writes before a stack; the stacks that a dying run writes are without."""


@dataclass(frozen=True)
class Fallen:
    """A rank that has ended badly, or a host that was lost."""

    rank: int | None
    """None: the whole host does not answer any more."""
    code: int | None
    """Negative: the signal that ended it; None: not known."""
    host: str


def tell(run: RunFolder, fallen: Sequence[Fallen], status: int, ranks: int) -> str | None:
    """Return why the run ended with `status`, in lines; None where the ranks have said so themselves."""
    if status in TOLD:
        return None
    lost = [one.host for one in fallen if one.rank is None]
    if lost:
        return f"{', '.join(lost)}: does not answer any more; the ranks on the other hosts were ended"
    hung = stacks(run)
    if hung:
        missing = sorted(set(range(ranks)) - set(hung))
        mute = f"; rank {', '.join(map(str, missing))} wrote none: stopped, or cut off" if missing else ""
        minutes = read_json(run.recipe)["hang_minutes"]
        return f"no step ended for {minutes:g} minutes; the Python stack of each rank is in {run.ranks}{mute}"
    if not fallen:
        return f"the DeepSpeed launcher ended with exit status {status}"
    first = fallen[0]
    log = run.ranks / f"rank-{first.rank}.log"
    said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:] if log.exists() else []
    lines = [f"rank {first.rank} on {first.host} {how(first.code, status)}" + ("; it said last:" if said else "")]
    return redact("\n".join([*lines, *(f"  | {line}" for line in said)]))


def how(code: int | None, status: int) -> str:
    """Return how a process ended."""
    if code is None:  # DeepSpeed's launcher passes the first bad status on, a signal as 256 - its number
        code = status - 256 if status > 192 else status
    if code >= 0:
        return f"ended with exit status {code}"
    return f"was ended by {signal.Signals(-code).name}"


def stacks(run: RunFolder) -> list[int]:
    """Return the ranks that have written a stack because no step ended."""
    files = run.ranks.glob("rank-*.stack")
    return sorted(int(file.stem.partition("-")[2]) for file in files if file.read_text().startswith(HUNG))


def forget_stacks(run: RunFolder) -> None:
    """Remove the stacks of an attempt that is over."""
    for file in run.ranks.glob("rank-*.stack"):
        file.unlink(missing_ok=True)  # each node of several does it
