"""What a process starts and writes ends with it, however it ends."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from deepspeed_recipes.machine import children
from tests.servers import eventually
from tests.tiers import tiered

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
