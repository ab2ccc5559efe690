"""Runs that take turns on the same cores: one computes up to its next record while the others are stopped.

The speed of a shared machine changes by a third within minutes, which alone makes consecutive runs differ. Here a cycle
of turns takes seconds, so that such a change affects all runs alike. This works for CPU ranks only: stopping a process
does not stop the kernels that it has queued on a GPU, and such a kernel may be waiting for another rank's.
"""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..machine.children import killed_with_this_process

POLL = 0.005
"""Seconds between two checks for a new record; a turn is a thousand times as long."""


@dataclass(frozen=True)
class Turn:
    """One turn of a run: the work up to its next record."""

    record: dict[str, Any]
    """The record that ended the turn."""
    tokens: int
    """Tokens since the previous record."""
    seconds: float


@dataclass
class Contender:
    """A running command that appends JSON records, one per line, to a file."""

    command: list[str]
    environment: Mapping[str, str]
    records: Path
    """The file with the records: one that the command writes, or its output."""
    output: Path
    """The file with the command's output."""
    turns: list[Turn] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the command in its own session."""
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                self.command, env=dict(self.environment), stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def take_turn(self, most: float = float("inf")) -> None:
        """Compute up to the next record, for `most` seconds.

        Raises:
            RuntimeError: the run has ended without another record, or takes longer.
        """
        self.signal(signal.SIGCONT)
        began = time.perf_counter()
        ended = False
        while (record := self._next_record()) is None:
            if ended:  # it had ended before the last check, so there are no more records
                self.finish()
                raise RuntimeError(f"{' '.join(self.command)} ended before its last step")
            if time.perf_counter() - began > most:
                raise RuntimeError(f"{' '.join(self.command)} has not come further in {most:.0f} s\n{self.tail()}")
            time.sleep(POLL)
            ended = self.running.poll() is not None
        seconds = time.perf_counter() - began
        self.signal(signal.SIGSTOP)
        before = self.turns[-1].record["tokens"] if self.turns else 0
        self.turns.append(Turn(record, record["tokens"] - before, seconds))

    def finish(self) -> None:
        """Let the command run to its end.

        Raises:
            RuntimeError: the command failed; the message ends with its last output.
        """
        self.signal(signal.SIGCONT)
        if self.running.wait():
            raise RuntimeError(f"{' '.join(self.command)}\n{self.tail()}")

    def tail(self) -> str:
        """Return the end of the command's output."""
        return self.output.read_text(errors="replace")[-6000:]

    def signal(self, number: int) -> None:
        """Send a signal to all processes of the command."""
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(self.running.pid, number)

    def end(self) -> None:
        """Kill all processes of the command."""
        self.signal(signal.SIGKILL)
        self.running.wait()

    @property
    def running(self) -> subprocess.Popen[bytes]:
        """The process that was started."""
        assert self.process is not None
        return self.process

    def _next_record(self) -> dict[str, Any] | None:
        lines = self.records.read_bytes().split(b"\n")[:-1] if self.records.exists() else []
        found = [line for line in lines if line.startswith(b"{")][len(self.turns) :]
        return json.loads(found[0]) if found else None


def take_turns(contenders: list[Contender], last_step: int, most: float = float("inf")) -> None:
    """Run all contenders to the end, one record per turn, reversing the order after every cycle.

    Raises:
        RuntimeError: a contender failed, or took longer than `most` seconds for a turn.
    """
    with contextlib.ExitStack() as stack:
        for one in contenders:
            one.start()
            stack.enter_context(killed_with_this_process(one.running.pid))
            stack.callback(one.end)
            one.take_turn(most)
        order = contenders
        while under_way := [one for one in order if one.turns[-1].record["step"] < last_step]:
            for one in under_way:
                one.take_turn(most)
            order = order[::-1]
        for one in contenders:
            one.finish()
