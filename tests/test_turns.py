"""Runs that take turns: one computes while the others stand still, to the end, and nothing is left behind."""

import sys

import psutil
import pytest

from deepspeed_recipes.benchmarks.overhead import WARM_UP, Contender, Turn, steady, take_turns

COUNTS = """
import json, sys, time
for step in range(1, 5):
    total = sum(range(int(sys.argv[1])))
    record = {"step": step, "tokens": 10 * step, "ended": time.perf_counter(), "computed": time.process_time()}
    print(json.dumps(record), flush=True)
    if step == int(sys.argv[2]):
        raise SystemExit("no more")
"""
WITHIN = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {COUNTS!r}, *sys.argv[1:]]))"
"""As launchers do: a process of its own computes."""


def contender(tmp_path, name, work=10_000_000, fails_at=0):
    output = tmp_path / f"{name}.log"
    return Contender([sys.executable, "-c", WITHIN, str(work), str(fails_at)], {}, output, output)


def test_only_one_computes_at_a_time_and_all_come_to_their_end(tmp_path):
    both = [contender(tmp_path, "a"), contender(tmp_path, "b")]
    take_turns(both, last_step=4)
    for one in both:
        assert [turn.record["step"] for turn in one.turns] == [1, 2, 3, 4]
        assert [turn.tokens for turn in one.turns] == [10] * 4
        assert one.running.returncode == 0
    for one in both:
        first, last = (turn.record for turn in (one.turns[0], one.turns[-1]))
        counted = sum(turn.seconds for turn in one.turns[1:])
        assert counted > 0.7 * (last["computed"] - first["computed"]), "all that was computed is counted"
        assert counted < 0.8 * (last["ended"] - first["ended"]), "and the pauses are not"


def test_runs_side_by_side_would_be_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(Contender, "signal", lambda self, number: None)
    with pytest.raises(AssertionError):
        test_only_one_computes_at_a_time_and_all_come_to_their_end(tmp_path)


def test_a_run_that_fails_ends_the_others_and_says_why(tmp_path):
    both = [contender(tmp_path, "a", work=10**8), contender(tmp_path, "b", fails_at=2)]
    with pytest.raises(RuntimeError, match="no more"):
        take_turns(both, last_step=4)
    assert all(one.running.poll() is not None for one in both)
    assert not [one for one in psutil.Process().children(recursive=True) if "perf_counter" in " ".join(one.cmdline())]


def test_the_rate_is_the_median_of_turns_after_the_warm_up():
    turns = [Turn({"step": step, "host_peak_gib": 1.0}, 100, seconds) for step, seconds in STEPS]
    assert steady(turns) == {"tokens_per_second": 50.0, "peak_gib": 1.0}


STEPS = [(WARM_UP - 5, 10.0), (WARM_UP, 10.0), (WARM_UP + 5, 2.0), (WARM_UP + 10, 2.0), (WARM_UP + 15, 9.0)]
