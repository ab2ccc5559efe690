"""Runs a recipe as a SLURM batch job: fills the script `job.sbatch.jinja`, submits it, and follows its log."""

import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ...recipe import files
from ...recipe.errors import UserError
from ...recipe.project import IMPORT_ROOT
from ...recipe.run_folder import REWIND, RunFolder
from .. import variables
from ..options import Allocation
from ..templates import fill

TEMPLATE = Path(__file__).with_name("job.sbatch.jinja")
WAIT = 15
"""Seconds within which the other nodes must end after the first node has ended."""
WARNING = 300
"""Seconds before the time limit at which the ranks receive the signal to write a checkpoint."""
POLL = 2.0
"""Seconds between two reads of the queue while the log is followed."""
UNFINISHED = (
    *("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"),
    *("SUSPENDED", "REQUEUED", "PREEMPTED", "RESIZING"),
)
"""States of a job that may still run; all other states are final.
https://slurm.schedmd.com/squeue.html#SECTION_JOB-STATE-CODES"""


def script(asked: Allocation, folder: RunFolder, environment: Mapping[str, str]) -> str:
    """Return the batch script. The user sets other options with SBATCH_ACCOUNT, SBATCH_QOS and similar variables.

    Raises:
        UserError: a run folder whose name SLURM would read differently.
    """
    if wrong := re.search(r"[%'\"\\]", str(folder.path)):  # sbatch has its own rules for quotes, and %j is the job
        raise UserError(
            f"--output-dir {folder.path}: with --slurm the path may not contain {wrong[0]}; choose another folder."
        )
    exports = variables.forwarded(environment)
    exports |= {name: environment[name] for name in ("TORCH_EXTENSIONS_DIR", "PYTHONPATH")}
    return fill(
        TEMPLATE,
        asked=asked,
        name=re.sub(r"[^\w.-]+", "-", asked.name),  # a page's name is a file's
        log=log(folder),
        warning=WARNING,
        wait=WAIT,
        rewind=REWIND,
        exports=exports,
        root=IMPORT_ROOT,
        python=sys.executable,
        bin=Path(sys.executable).parent,
        run=folder.path,
    )


def log(folder: RunFolder) -> Path:
    """Return the file for a job's output."""
    return folder.path / "slurm.log"


def path(folder: RunFolder) -> Path:
    """Return the path of the batch script."""
    return folder.path / "slurm.sbatch"


def submit(folder: RunFolder, text: str, environment: Mapping[str, str]) -> str:
    """Write the script to the run folder, submit it, and return the job's number.

    Raises:
        UserError: SLURM rejects the job.
    """
    files.write_text(path(folder), text)
    done = subprocess.run(["sbatch", "--parsable", path(folder)], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise UserError((done.stderr.strip().splitlines() or ["sbatch: failed"])[-1])
    return done.stdout.strip().partition(";")[0]


def follow(number: str, folder: RunFolder) -> int:
    """Print the job's log as it grows, also after requeues, and return the job's exit status.

    Ctrl-C stops following and leaves the job running.
    """
    print(f"job {number}: log in {log(folder)} (Ctrl-C leaves it running; scancel {number} ends it)", flush=True)
    shown, state, reason = 0, "", ""
    try:
        while True:
            facts = subprocess.run(["scontrol", "-o", "show", "job", number], capture_output=True, text=True).stdout
            found = re.search(r"JobState=(\w+) Reason=(\w+)", facts)
            shown = _print_from(log(folder), shown)
            if found and found.groups() != (state, reason):
                state, reason = found.groups()
                print(f"job {number}: {state.lower()}{'' if reason == 'None' else f' ({reason})'}", flush=True)
            if not found or state not in UNFINISHED:
                break
            time.sleep(POLL)
    except KeyboardInterrupt:
        return 0
    if state == "COMPLETED":
        return 0
    status = re.search(r"ExitCode=(\d+):(\d+)", facts)
    code, number_of_signal = map(int, status.groups()) if status else (0, 0)
    return code or (128 + number_of_signal if number_of_signal else 1)


def _print_from(file: Path, start: int) -> int:
    if not file.exists():
        return start
    with file.open("rb") as text:
        text.seek(start)
        new = text.read()
    sys.stdout.write(new.decode(errors="replace"))
    sys.stdout.flush()
    return start + len(new)
