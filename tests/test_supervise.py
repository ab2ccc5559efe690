"""When one process of a run dies, the others are ended and the reason is reported.

What a process starts and writes ends with it, however it ends.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from deepspeed_recipes.launching import supervise
from deepspeed_recipes.launching.ranks import RankMonitor, of_run
from deepspeed_recipes.machine import children
from deepspeed_recipes.recipe.run_folder import REWIND, RunFolder, write_json, write_recipe
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training.callbacks import stopping
from tests.ranks import read_logs, run_on
from tests.servers import eventually
from tests.small import small
from tests.tiers import tiered
from tests.workers.hang import hang

FAKE = """
import os, subprocess, sys, time
ranks = [
    subprocess.Popen(
        [sys.executable, "-c", code, "deepspeed_recipes.training.run"], env=os.environ | {"RANK": str(rank)}
    )
    for rank, code in enumerate(sys.argv[1:])
]
while True:
    time.sleep(1)  # as DeepSpeed's launcher does
    for rank in ranks:
        if rank.poll():
            [other.terminate() for other in ranks]
            [other.wait() for other in ranks]
            sys.exit(rank.returncode % 256)
    if all(rank.poll() == 0 for rank in ranks):
        sys.exit(0)
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
AFTER = "import time; time.sleep(3); "


def test_the_processes_of_a_run_are_found_by_their_words_and_its_folder(tmp_path):
    kind = ["-c", "input()", "rank"]
    started = [
        subprocess.Popen([sys.executable, *kind, folder], stdin=subprocess.PIPE) for folder in (str(tmp_path), "other")
    ]
    try:
        assert [one.pid for one in of_run(str(tmp_path), ["-m", "another"], kind)] == [started[0].pid]
    finally:
        for one in started:
            one.communicate(b"\n")


@pytest.mark.parametrize("killed", [0, 1])
def test_of_ranks_that_fail_at_once_the_killed_one_comes_first(killed):
    """A busy machine shows a killed rank together with one whose connection to it broke."""
    command = [sys.executable, "-c", "input()"]
    ranks = [subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in range(2)]
    monitor = RankMonitor(lambda known: [(rank.pid, number) for number, rank in enumerate(ranks)], 2)
    assert monitor.failed(0) == []
    ranks[killed].kill()
    for rank in ranks:
        rank.stdin.close()
    for rank in ranks:  # ended, and not waited for: /proc still has the exit code
        os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
    assert monitor.failed(5) == [(killed, -signal.SIGKILL), (1 - killed, 1)]
    monitor.close()
    for rank in ranks:
        rank.wait()


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """Return a function that supervises ranks, given by their code, and returns how that ended and after how long."""
    monkeypatch.setattr(supervise, "LAST_GRACE", 2)
    run = RunFolder(tmp_path)
    run.ranks.mkdir()
    write_json(run.recipe, {"hang_minutes": 25.0})

    def of(*codes):
        begun = time.monotonic()
        outcome = supervise.supervise([sys.executable, "-c", FAKE, *codes], None, run, len(codes))
        return outcome, time.monotonic() - begun

    return of


@pytest.mark.parametrize(
    ("how", "codes", "status"),
    [
        ("os.kill(os.getpid(), 9)", [], 128 + 9),
        ("os.kill(os.getpid(), 9)", [-11], 128 + 11),  # it was killed here, after its rank had failed
        ("os.kill(os.getpid(), 9)", [None], 128 + 9),
        ("sys.exit(3)", [-11], 3),
    ],
)
def test_the_status_is_the_launchers_unless_it_was_killed_for_a_rank(how, codes, status):
    failed = [supervise.FailedRank(0, code, "here") for code in codes]
    with subprocess.Popen([sys.executable, "-c", f"import os, sys; {how}"]) as launcher:
        launcher.wait()
        assert supervise.wait(launcher, SimpleNamespace(failed=lambda seconds: failed)) == (failed, status)


@pytest.mark.parametrize(
    ("last", "status", "said"),
    tiered(
        [
            ("raise SystemExit(3)", 3, "exited with status 3"),
            ("import os; os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL"),
            ("import os; os.kill(os.getpid(), 11)", 139, "was killed by SIGSEGV"),
        ],
        lambda case: case[1] == 137,
    ),
)
def test_the_first_rank_to_die_is_named_and_the_others_are_ended(attempt, tmp_path, last, status, said):
    (tmp_path / "ranks" / "rank-1.log").write_text("".join(f"line {at}\n" for at in range(20)))
    outcome, seconds = attempt(STUBBORN, AFTER + last, STUBBORN)
    assert outcome.status == status and not outcome.stopped
    lines = outcome.cause.splitlines()
    assert lines[0] == f"rank 1 on {socket.gethostname()} {said}; the last lines of its log:"
    assert lines[1:] == [f"  | line {at}" for at in range(12, 20)]
    assert seconds < 3 + 2 + 10


SUPERVISE = """
import sys
from pathlib import Path
from deepspeed_recipes.launching import supervise
from deepspeed_recipes.recipe.run_folder import RunFolder
supervise.supervise([sys.executable, "-c", *sys.argv[2:]], None, RunFolder(Path(sys.argv[1])), len(sys.argv) - 3)
"""
SAYS = "import os; os.write(1, b'%d\\n' % os.getpid()); "  # in one piece: both ranks write to one pipe


def test_ranks_die_with_a_killed_launcher(tmp_path):
    """Ranks that ignore signals and that are stopped, below a launcher that looks at neither."""
    words = [sys.executable, "-c", SUPERVISE, str(tmp_path), FAKE, SAYS + STUBBORN, SAYS + STUBBORN]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as launcher:
        ranks = [psutil.Process(int(launcher.stdout.readline())) for _ in range(2)]
        family = [*ranks, *psutil.Process(launcher.pid).children(recursive=True)]
        time.sleep(1)  # until the launcher watches
        ranks[1].suspend()
        launcher.kill()
        left = psutil.wait_procs(family, timeout=20)[1]
        for process in left:
            process.kill()
    assert left == []


@pytest.mark.every
def test_ranks_that_succeed_or_have_printed_the_reason_need_no_cause(attempt):
    assert attempt(AFTER, AFTER)[0] == supervise.Outcome(0, None, False)
    for status in (2, REWIND):
        assert attempt(AFTER + f"raise SystemExit({status})", AFTER)[0] == supervise.Outcome(status, None, False)


def test_secrets_stay_out_of_the_cause(attempt, tmp_path):
    (tmp_path / "ranks" / "rank-0.log").write_text("key " + "0123456789" * 4)
    outcome, _ = attempt(AFTER + "raise SystemExit(1)")
    assert "key ***" in outcome.cause


def test_a_launcher_that_starts_no_rank_is_named(tmp_path):
    outcome = supervise.supervise([sys.executable, "-c", "raise SystemExit(4)"], None, RunFolder(tmp_path), 2)
    assert outcome == supervise.Outcome(4, "DeepSpeed's launcher exited with status 4", False)


@pytest.mark.parametrize(
    ("code", "status", "said"), [(None, 247, "SIGKILL"), (None, 7, "status 7"), (-6, 1, "SIGABRT")]
)
def test_how_a_process_ended(code, status, said):
    assert said in supervise.ending(code, status)


@pytest.mark.parametrize("how", tiered(("asleep", "with the interpreter's lock"), ("with the interpreter's lock",)))
def test_a_run_that_hangs_ends_and_shows_where(ranks, tmp_path, model_folder, conversations, how):
    run = RunFolder(tmp_path / "run")
    write_recipe(run, small(model_folder, conversations, hang_minutes=0.1, save_steps=2))
    begun = time.monotonic()
    statuses = ranks.run(hang, str(run.path), how, log=tmp_path / "log")
    assert statuses == [1, 1] and time.monotonic() - begun < 120, read_logs(tmp_path / "log")
    assert "hang_here" in (run.ranks / "rank-1.stack").read_text()
    assert "hang_here" not in (run.ranks / "rank-0.stack").read_text()
    assert "in all_reduce" in (run.ranks / "rank-0.stack").read_text()
    hung = f"no step finished for 0.1 minutes; each rank's Python stack is in {run.ranks}"
    assert supervise.explain(run, [], 1, 2) == hung
    assert "none from rank 2, which was stopped or cut off" in supervise.explain(run, [], 1, 3)
    assert "step 3/6" not in read_logs(tmp_path / "log")[0]


def test_the_watchdog_can_be_off_and_costs_little(ranks, tmp_path, model_folder, conversations, monkeypatch):
    run = run_on(ranks, small(model_folder, conversations, hang_minutes=0), tmp_path)
    assert not list(run.ranks.glob("*.stack")) and len(list(run.ranks.glob("*.log"))) == 2
    monkeypatch.setenv("RANK", "0")
    dog = stopping.Watchdog(run, 1)
    dog.on_train_begin()
    begun = time.perf_counter()
    for _ in range(200):
        dog.on_step_end()
    dog.on_train_end()
    assert (time.perf_counter() - begun) / 200 < 5e-3  # seconds per step


@pytest.mark.every
def test_what_a_rank_prints_is_kept(ranks, tmp_path, model_folder, conversations):
    run = RunFolder(tmp_path / "run")
    write_recipe(run, small(model_folder, conversations, on_nan="skip"))
    assert ranks.run(training_run.main, str(run.path), log=tmp_path / "log") == [2, 2]
    assert all("on_nan=skip" in (run.ranks / f"rank-{rank}.log").read_text() for rank in (0, 1))


# A child with a child of its own, both of which hang, and the second of which writes into the scratch folder.
CHILD = """
import subprocess, sys
open("x", "w").close()
subprocess.run([sys.executable, "-c", "while True: open('y', 'w').close()"])
"""
PARENT = f"""
import os, signal, sys
from deepspeed_recipes.machine import children

with children.scratch() as place, children.running([sys.executable, "-c", {CHILD!r}], cwd=place):
    while not (place / "y").exists():
        pass
    print(place, flush=True)
"""
ENDS = {
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM)",
    "Ctrl-C": "os.kill(os.getpid(), signal.SIGINT)",
    "its own group is killed": "os.killpg(0, signal.SIGKILL)",
    "without cleaning up": "os._exit(3)",
    "an exception": "raise ValueError",
    "in a moment": "pass",
}


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes that have a word in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            pass
    return found


SAME = ("SIGTERM", "Ctrl-C", "without cleaning up")
"""Ways that end as another one does: without any code of Python's, or by an exception."""


@pytest.mark.parametrize("how", tiered(ENDS, ENDS.keys() - set(SAME)))
def test_neither_a_process_nor_a_folder_is_left(how, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", f"{PARENT}    {ENDS[how]}\n"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path), "MARK": str(tmp_path)},
        start_new_session=True,
    )
    assert done.stdout.strip().startswith(str(tmp_path))
    eventually(lambda: not marked(str(tmp_path)))
    eventually(lambda: not os.listdir(tmp_path))


def test_a_child_whose_parent_dies_before_its_start_never_starts(tmp_path):
    """The word that lets a child become its command comes after somebody watches over it."""
    forked = os.fork()
    if not forked:
        children.killed_with_this_process = lambda group: os._exit(0)
        with children.running(["touch", str(tmp_path / "started")]):
            os._exit(1)
    assert os.waitpid(forked, 0)[1] == 0
    time.sleep(0.3)
    assert not os.listdir(tmp_path)


def test_a_command_is_given_what_it_was_given():
    words = ["a b", "$HOME", "'", "--", "-x", "é\n"]
    code = "import sys; print(ascii(sys.argv[1:])); sys.stderr.write(sys.stdin.read()); sys.exit(7)"
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True}
    done = children.run([sys.executable, "-c", code, *words], **options)
    assert (done.returncode, done.stdout, done.stderr) == (7, ascii(words) + "\n", "")
    assert children.run(["/nowhere"], stderr=subprocess.DEVNULL).returncode == 127
    assert children.run(["sh", "-c", "kill -9 $$"]).returncode == -9
    with pytest.raises(subprocess.TimeoutExpired):
        children.run(["sleep", "97"], timeout=0.2)
    assert not [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", "97"]]


RANKS = """
import os, signal, sys, time
from pathlib import Path
from deepspeed_recipes.prove.ranks import Ranks

if __name__ == "__main__":
    with Ranks(("json",)) as ranks:
        for rank in ranks.start(time.sleep, 97, log=Path(sys.argv[1], "log")):
            print(rank.pid, flush=True)
        time.sleep(97)
"""


def test_ranks_of_a_proof_end_with_their_program(tmp_path):
    (tmp_path / "proof.py").write_text(RANKS)
    with subprocess.Popen(
        [sys.executable, tmp_path / "proof.py", tmp_path], stdout=subprocess.PIPE, text=True
    ) as proof:
        ranks = [psutil.Process(int(proof.stdout.readline())) for _ in range(2)]
        eventually(lambda: all((tmp_path / f"log.{rank}").exists() for rank in range(2)))
        proof.kill()
    assert psutil.wait_procs(ranks, 10)[1] == []
