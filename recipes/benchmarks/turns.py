"""Runs that take turns on the same cores: one computes up to its next record, while the others stand still.

The speed of a shared machine changes by a third within minutes, and a comparison of runs that follow each other shows
that and not their difference. Here every cycle of turns takes seconds, and a change meets all of them alike. For ranks
on CPUs only: a GPU goes on with the kernels of a stopped process, which may wait for those of another one.
"""

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

POLL = 0.005
"""Seconds between two looks for a record; a turn is a thousand times as long."""


@dataclass(frozen=True)
class Turn:
    """What a run did while the others stood still."""

    record: dict[str, Any]
    """The record that ended it."""
    tokens: int
    """Since the record before it."""
    seconds: float


@dataclass
class Contender:
    """A command under way that appends JSON records, one per line, to a file."""

    command: list[str]
    environment: Mapping[str, str]
    records: Path
    """Where its records are: its own file, or what it prints."""
    output: Path
    """What it prints."""
    turns: list[Turn] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None
    seen: int = 0
    tokens: int = 0

    def start(self) -> None:
        """Start it, computing."""
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                self.command, env=dict(self.environment), stdout=out, stderr=subprocess.STDOUT
            )

    def take_turn(self) -> bool:
        """Compute up to the next record, and return whether there was one; the run has ended otherwise."""
        self.signal(signal.SIGCONT)
        began = time.perf_counter()
        while (record := self._next_record()) is None:
            if self.running.poll() is not None:
                return False
            time.sleep(POLL)
        seconds = time.perf_counter() - began
        self.signal(signal.SIGSTOP)
        self.turns.append(Turn(record, record["tokens"] - self.tokens, seconds))
        self.tokens = record["tokens"]
        return True

    def finish(self) -> None:
        """Let it end.

        Raises:
            RuntimeError: it failed; with the end of its output.
        """
        self.signal(signal.SIGCONT)
        if self.running.wait():
            raise RuntimeError(f"{' '.join(self.command)}\n{self.output.read_text(errors='replace')[-6000:]}")

    def signal(self, number: int) -> None:
        """Send a signal to all its processes."""
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.running.pid)
            for process in (parent, *parent.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

    @property
    def running(self) -> subprocess.Popen[bytes]:
        """The process that was started."""
        assert self.process is not None
        return self.process

    def _next_record(self) -> dict[str, Any] | None:
        lines = self.records.read_bytes().split(b"\n")[:-1] if self.records.exists() else []
        found = [line for line in lines if line.startswith(b"{")][self.seen :]
        if not found:
            return None
        self.seen += 1
        return json.loads(found[0])


def take_turns(contenders: list[Contender], last_step: int) -> None:
    """Run all of them to their ends, with a turn for each record; in every other cycle in the opposite order.

    Raises:
        RuntimeError: one failed.
    """
    with _ended(contenders):
        for one in contenders:
            one.start()
            one.take_turn()
        cycle = 0
        while under_way := [one for one in contenders if one.turns and one.turns[-1].record["step"] < last_step]:
            for one in under_way if cycle % 2 == 0 else reversed(under_way):
                if not one.take_turn():
                    one.finish()
                    raise RuntimeError(f"{' '.join(one.command)} ended before step {last_step}")
            cycle += 1
        for one in contenders:
            one.finish()


@contextlib.contextmanager
def _ended(contenders: list[Contender]) -> Iterator[None]:
    """Leave no process behind, whatever happens."""
    try:
        yield
    finally:
        for one in contenders:
            if one.process is not None and one.process.poll() is None:
                one.signal(signal.SIGKILL)
                one.process.wait()
