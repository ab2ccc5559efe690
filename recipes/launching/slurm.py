"""SLURM: a batch script that runs DeepSpeed's launcher on each node, and queues again when it is preempted."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from recipes.launching import variables
from recipes.spec.errors import UserError
from recipes.spec.pages import ROOT
from recipes.spec.run_folder import REWIND, RunFolder

WAIT = 15
"""Seconds that the other nodes get to end after the first one has."""
WARNING = 300
"""Seconds before the time limit at which the ranks are asked for a checkpoint."""
POLL = 2.0
"""Seconds between two looks at the queue while the log is followed."""


@dataclass(frozen=True)
class Partition:
    """What a job may have."""

    name: str
    nodes: int
    gpus: int
    """Of the node that has fewest."""


@dataclass(frozen=True)
class Job:
    """What a job asks for."""

    name: str
    nodes: int
    per_node: int
    """Ranks."""
    gpus: bool
    """Whether the ranks have a GPU each."""
    partition: str | None = None
    time: str | None = None
    restarts: int = 0
    """How often it may go on by itself after a crash or a hang; 0: as the cluster is used to."""

    @property
    def ranks(self) -> int:
        """The world size."""
        return self.nodes * self.per_node


def partitions(listing: str) -> Iterator[Partition]:
    """Yield the partitions that `sinfo -h -o '%P|%D|%G'` lists, the default one first."""
    found: dict[str, list[tuple[int, int]]] = {}
    for line in listing.split():
        name, nodes, resources = line.split("|")
        # gpu:8, gpu:h100:8(S:0-1), gpu:a100:4,gpu:h100:4; other resources stand between commas too.
        gpus = sum(int(count) for count in re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", resources))
        found.setdefault(name, []).append((int(nodes), gpus))
    for name in sorted(found, key=lambda name: not name.endswith("*")):
        kinds = found[name]
        yield Partition(name.rstrip("*"), sum(nodes for nodes, _ in kinds), min(gpus for _, gpus in kinds))


def job(
    name: str, nodes: int | None, ranks: int | None, partition: str | None, limit: str | None, dry_run: bool
) -> Job:
    """Return what to ask the cluster for.

    Raises:
        UserError: no SLURM here, no such partition, more nodes or GPUs than it has, or a limit that is no time.
    """
    # https://slurm.schedmd.com/sbatch.html#OPT_time: minutes, minutes:seconds, hours:..., days-hours...
    if limit is not None and not re.fullmatch(r"(\d+-\d+(:\d+){0,2}|\d+(:\d+){0,2})", limit):
        raise UserError(f"--time {limit}: no time limit; SLURM's are minutes, hours:minutes:seconds or days-hours.")
    nodes = 1 if nodes is None else nodes
    if nodes < 1 or (ranks is not None and ranks < 1):
        raise UserError("--nodes and --gpus: at least 1.")
    there = _partitions_here(dry_run)
    if there is None:
        return Job(name, nodes, ranks or 1, True, partition, limit)
    wanted = next((one for one in there if partition in (None, one.name)), None)
    if wanted is None:
        raise UserError(f"--partition {partition}: this cluster has {', '.join(one.name for one in there) or 'none'}.")
    if nodes > wanted.nodes:
        raise UserError(f"--nodes {nodes}: partition {wanted.name} has {wanted.nodes}.")
    if wanted.gpus and ranks and ranks > wanted.gpus:
        raise UserError(f"--gpus {ranks}: the nodes of partition {wanted.name} have {wanted.gpus}.")
    return Job(name, nodes, ranks or wanted.gpus or 2, wanted.gpus > 0, partition, limit)


def _partitions_here(dry_run: bool) -> list[Partition] | None:
    """Return what this cluster has; None where there is none and nothing is about to be submitted."""
    if not shutil.which("sinfo") or not shutil.which("sbatch"):
        if dry_run:
            return None
        raise UserError("--slurm: no sbatch here; run this on a login node, or look at the script with --dry-run.")
    try:
        return list(partitions(ask("sinfo", "-h", "-o", "%P|%D|%G")))
    except UserError:
        if dry_run:
            return None
        raise


def ask(*command: str) -> str:
    """Return what one of SLURM's commands prints.

    Raises:
        UserError: it fails; its last line says why.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["failed"])[-1]
        raise UserError(f"{command[0]}: {last.removeprefix(f'{command[0]}: ')}")
    return done.stdout


def script(asked: Job, folder: RunFolder, environment: Mapping[str, str]) -> str:
    """Return the batch script. What it does not say, sbatch takes from SBATCH_ACCOUNT, SBATCH_QOS and so on."""
    options = {
        "job-name": asked.name,
        "nodes": asked.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": asked.per_node if asked.gpus else None,
        "partition": asked.partition,
        "time": asked.time,
        "output": log(folder),
        "open-mode": "append",
        "signal": f"B:USR1@{WARNING}",
    }
    head = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    carried = variables.travelling(environment)
    carried |= {name: environment[name] for name in ("TORCH_EXTENSIONS_DIR", "PYTHONPATH")}
    exports = [f"export {name}={shlex.quote(value)}" for name, value in carried.items()]
    python, run = shlex.quote(sys.executable), shlex.quote(str(folder.path))
    return f"""#!/usr/bin/env bash
{os.linesep.join(head)}
#SBATCH --exclusive
#SBATCH --requeue
# Secrets (HF_TOKEN, WANDB_API_KEY) are not written here: sbatch hands the submitting shell's environment on.
{os.linesep.join(exports)}
export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH
cd {shlex.quote(str(ROOT))} || exit

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol --oneliner show node "$first" | sed -n 's/.* NodeAddr=\\([^ ]*\\) .*/\\1/p')
port=$((20000 + SLURM_JOB_ID % 20000 + ${{SLURM_RESTART_COUNT:-0}} % 100))

# {WARNING} s before the time limit the ranks write a checkpoint and end, and the job queues again.
soon() {{
    again=yes
    srun --overlap --ntasks-per-node=1 {python} -m recipes.launching.ranks signal 15 {run}
}}
trap soon USR1
left={asked.restarts}
trap 'left=0' TERM  # on preemption the ranks get it too, and have KillWait seconds for a checkpoint; SLURM queues again

while :; do
    # {WAIT} s after the first node has ended SLURM ends the others: not at once, so that all can say why.
    srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait={WAIT} {python} -m recipes.launching.node {run} \\
        --nodes "$SLURM_JOB_NUM_NODES" --gpus {asked.per_node} --master-addr "$address" --master-port "$port" &
    step=$!
    wait "$step"
    status=$?
    while kill -0 "$step" 2>/dev/null; do  # a trap has ended the waiting, not the step
        wait "$step"
        status=$?
    done
    # 2: a mistake. summary.json: done, or stopped.
    if [ "$status" -eq 0 ] || [ "$status" -eq 2 ] || [ -e {run}/summary.json ]; then
        break
    fi
    if [ "$status" -ne {REWIND} ]; then  # {REWIND}: the ranks want to go back by themselves
        [ "$left" -gt 0 ] || break
        left=$((left - 1))
    fi
    echo "starting again after exit status $status; restarts left: $left"
    srun --ntasks-per-node=1 {python} -m recipes.launching.ranks signal 9 {run} > /dev/null
    port=$((port + 1))
done
if [ -n "${{again:-}}" ] && [ -e {run}/summary.json ]; then
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def log(folder: RunFolder) -> Path:
    """Return the file that a job's output goes to."""
    return folder.path / "slurm.log"


def path(folder: RunFolder) -> Path:
    """Return where the batch script is kept."""
    return folder.path / "slurm.sbatch"


def submit(folder: RunFolder, text: str, environment: Mapping[str, str]) -> str:
    """Keep the script in the run folder, submit it and return the job's number.

    Raises:
        UserError: SLURM refuses it.
    """
    path(folder).write_text(text, encoding="utf-8")
    done = subprocess.run(["sbatch", "--parsable", path(folder)], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise UserError((done.stderr.strip().splitlines() or ["sbatch: failed"])[-1])
    return done.stdout.strip().partition(";")[0]


def follow(number: str, folder: RunFolder) -> int:
    """Print the job's log as it grows, requeues included, and return the job's exit status; Ctrl-C leaves it running.

    Every job state but these is an end: https://slurm.schedmd.com/squeue.html#SECTION_JOB-STATE-CODES
    """
    print(
        f"job {number}; its log is {log(folder)} (Ctrl-C leaves the job running: scancel {number} ends it)", flush=True
    )
    shown, state, reason = 0, "", ""
    try:
        while True:
            facts = subprocess.run(["scontrol", "-o", "show", "job", number], capture_output=True, text=True).stdout
            found = re.search(r"JobState=(\w+) Reason=(\w+)", facts)
            shown = _print_from(log(folder), shown)
            if found and found.groups() != (state, reason):
                state, reason = found.groups()
                print(f"job {number}: {state.lower()}{'' if reason == 'None' else f' ({reason})'}", flush=True)
            going = (
                "PENDING",
                "CONFIGURING",
                "RUNNING",
                "COMPLETING",
                "SUSPENDED",
                "REQUEUED",
                "PREEMPTED",
                "RESIZING",
            )
            if not found or state not in going:
                break
            time.sleep(POLL)
    except KeyboardInterrupt:
        return 0
    status = re.search(r"ExitCode=(\d+):(\d+)", facts)
    if state == "COMPLETED" or not status:
        return 0 if state == "COMPLETED" else 1
    return int(status[1]) or 128 + int(status[2]) if status[1] != "0" or status[2] != "0" else 1


def _print_from(file: Path, start: int) -> int:
    if not file.exists():
        return start
    with file.open("rb") as text:
        text.seek(start)
        new = text.read()
    sys.stdout.write(new.decode(errors="replace"))
    sys.stdout.flush()
    return start + len(new)
