"""A plugin that writes tests/durations.txt, what each test costs: `make durations`.

`make quick` leaves out what takes LONG or more. The figures of tests that did not run stay.
"""

from collections import Counter
from pathlib import Path

import pytest

FILE = Path(__file__).with_suffix(".txt")
LONG = 0.3
"""Seconds, on an otherwise idle machine."""
HEAD = f"# Seconds and test, for what takes {LONG:g} s or more; written by `make durations`.\n"


def read() -> dict[str, float]:
    """Return the seconds of every slow test."""
    lines = (line.split(maxsplit=1) for line in FILE.read_text(encoding="utf-8").splitlines()[1:])
    return {test: float(seconds) for seconds, test in lines}


spent: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add what a test's preparation, itself and its end took."""
    spent[report.nodeid] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the file, once."""
    if not hasattr(session.config, "workerinput"):
        found = {test: seconds for test, seconds in (read() | spent).items() if seconds >= LONG}
        lines = [f"{seconds:6.1f} {test}\n" for test, seconds in sorted(found.items())]
        FILE.write_text(HEAD + "".join(lines), encoding="utf-8")
