"""Explains why a run ended: the first failed rank, the last lines of its log, or each rank's stack after a hang."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from ..recipe.errors import redact
from ..recipe.run_folder import REWIND, RunFolder, read_json

LAST_LINES = 8
"""Number of lines of a failed rank's log to print."""
EXPLAINED = (0, 2, REWIND)
"""Exit statuses that need no explanation: the run finished, or the ranks have printed the reason."""
HUNG = "Timeout"
"""The first word of a stack that the interpreter's watchdog writes; stacks from a crash start differently."""


@dataclass(frozen=True)
class FailedRank:
    """A rank that has failed, or a host that was lost."""

    rank: int | None
    """The rank's number, or None if the whole host stopped answering."""
    code: int | None
    """Exit code, negative for a signal, or None if unknown."""
    host: str


def explain(run: RunFolder, failed: Sequence[FailedRank], status: int, ranks: int) -> str | None:
    """Return lines that explain why the run ended with `status`, or None if the ranks have printed the reason."""
    if status in EXPLAINED:
        return None
    lost = [one.host for one in failed if one.rank is None]
    if lost:
        return f"{', '.join(lost)} stopped answering; the ranks on the other hosts were ended"
    hung = stacks(run)
    if hung:
        missing = sorted(set(range(ranks)) - set(hung))
        silent = f"; none from rank {', '.join(map(str, missing))}, which was stopped or cut off" if missing else ""
        minutes = read_json(run.recipe)["hang_minutes"]
        return f"no step finished for {minutes:g} minutes; each rank's Python stack is in {run.ranks}{silent}"
    if not failed:
        return f"DeepSpeed's launcher exited with status {status}"
    first = failed[0]
    log = run.ranks / f"rank-{first.rank}.log"
    last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:] if log.exists() else []
    what = f"rank {first.rank} on {first.host} {ending(first.code, status)}"
    lines = [f"{what}; the last lines of its log:", *(f"  | {line}" for line in last)] if last else [what]
    return redact("\n".join(lines))


def ending(code: int | None, status: int) -> str:
    """Return how a process ended, as a clause."""
    if code is None:  # DeepSpeed's launcher passes on the first bad status, and a signal as 256 minus its number
        code = status - 256 if status > 192 else status
    if code >= 0:
        return f"exited with status {code}"
    return f"was killed by {signal.Signals(-code).name}"


def stacks(run: RunFolder) -> list[int]:
    """Return the ranks that have written a stack after a hang."""
    files = run.ranks.glob("rank-*.stack")
    return sorted(int(file.stem.partition("-")[2]) for file in files if file.read_text().startswith(HUNG))


def remove_stacks(run: RunFolder) -> None:
    """Remove the stacks of an earlier attempt."""
    for file in run.ranks.glob("rank-*.stack"):
        file.unlink(missing_ok=True)  # every node of a cluster removes them
