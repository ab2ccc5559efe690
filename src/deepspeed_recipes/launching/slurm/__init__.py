"""Runs a recipe as a SLURM batch job: requests nodes, fills `job.sbatch.jinja`, submits it, and follows its log."""

import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ...recipe.errors import UserError
from ...recipe.project import IMPORT_ROOT
from ...recipe.run_folder import REWIND, RunFolder
from .. import command
from ..options import Allocation, LaunchOptions
from ..templates import fill

TEMPLATE = Path(__file__).with_name("job.sbatch.jinja")
WAIT = 15
"""Seconds within which the other nodes must end after the first node has ended."""
WARNING = 300
"""Seconds before the time limit at which the ranks receive the signal to write a checkpoint."""
POLL = 2.0
"""Seconds between two reads of the queue while the log is followed."""
CORES = 4
"""Cores per rank of a part of a node, where SLURM would give a job a single one."""
OURS = {
    **dict.fromkeys(("--nodes", "-N"), "write --nodes"),
    **dict.fromkeys(("--partition", "-p"), "write --partition"),
    **dict.fromkeys(("--time", "-t"), "write --time"),
    **dict.fromkeys(("--account", "-A"), "write --account"),
    **dict.fromkeys(("--gpus", "-G", "--gpus-per-node", "--gpus-per-task", "--gres"), "write --gpus"),
    **dict.fromkeys(("--mem", "--mem-per-gpu", "--mem-per-cpu"), "write --mem, the memory per node"),
    **dict.fromkeys(("--exclusive", "--oversubscribe", "-s"), "jobs take whole nodes, or a part with --shared"),
    **dict.fromkeys(("--output", "-o", "--error", "-e"), "the launcher follows slurm.log in the run folder"),
    **dict.fromkeys(("--ntasks", "-n", "--ntasks-per-node"), "a task per node starts its ranks"),
    **dict.fromkeys(("--signal", "--requeue", "--no-requeue"), "the job itself saves before its limit and requeues"),
    **dict.fromkeys(("--array", "-a", "--wrap", "--open-mode"), "not this one"),
    **dict.fromkeys(("--export", "--export-file"), "the ranks need all of the job's environment"),
    **dict.fromkeys(("--wait", "-W", "--test-only", "--clusters", "-M"), "the launcher submits the job and follows it"),
}
"""Options of sbatch that the job file sets by itself, with the reason or the option to write instead."""
UNFINISHED = (*("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"), *("SUSPENDED", "REQUEUED", "PREEMPTED", "RESIZING"))
"""States of a job that may still run; all other states are final.
https://slurm.schedmd.com/squeue.html#SECTION_JOB-STATE-CODES"""


def script(asked: Allocation, folder: RunFolder, environment: Mapping[str, str]) -> str:
    """Return the batch script; refuse a run folder whose name SLURM would read differently."""
    if wrong := re.search(r"[%'\"\\]", str(folder.path)):  # sbatch has its own rules for quotes, and %j is the job
        raise UserError(
            f"--output-dir {folder.path}: with --slurm the path may not contain {wrong[0]}; choose another folder."
        )
    exports = command.forwarded(environment)
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
        cores=CORES * asked.ranks_per_node,
    )


def with_options(asked: Allocation, options: LaunchOptions) -> Allocation:
    """Return the allocation with the command line's other options for sbatch."""
    if options.account is not None and not re.fullmatch(r"[\w.,@+-]+", options.account):
        raise UserError(f"--account {options.account!r}: not an account's name.")
    if options.mem is not None and not re.fullmatch(r"\d+[KMGT]?", options.mem):
        raise UserError(f"--mem {options.mem}: write the host memory per node as 200G or 512000M, or 0 for all of it.")
    if options.shared and options.gpus is None:
        raise UserError("--shared: also name --gpus N, the part of each node that the job takes.")
    more: list[list[str]] = []
    try:
        words = shlex.split(options.sbatch or "")
    except ValueError as error:
        raise UserError(f"--sbatch {options.sbatch!r}: {str(error).lower()}.") from None
    for word in words:
        if word.startswith("-"):
            more.append([word])
        elif more:
            more[-1].append(word)
        else:
            raise UserError(f"--sbatch {word}: not an option; write, for example, --sbatch '--qos=high'.")
    for first, *values in more:
        option = " ".join((first, *values))
        name = re.split("[= ]", first)[0]
        name = name if name.startswith("--") else name[:2]
        if len(values) > (first == name) or not name.strip("-"):
            raise UserError(
                f"--sbatch {option}: write options with at most one value each, in quotes if it has spaces, as in "
                "--sbatch '--qos=high --constraint \"a100|h100\"'."
            )
        # sbatch also takes the beginning of a long option's name.
        if ours := next((one for one in OURS if one == name or (name[2:] and one.startswith(name))), None):
            raise UserError(f"--sbatch {name}: {OURS[ours]}.")
        if wrong := re.search(r"['\"\\]|[^\x20-\x7e]", option):  # sbatch has its own rules for quotes
            raise UserError(f"--sbatch {option!r}: an option may not contain {wrong[0]!r}.")
    return replace(asked, account=options.account, mem=options.mem, shared=options.shared, more=tuple(map(tuple, more)))


def log(folder: RunFolder) -> Path:
    """Return the file for a job's output."""
    return folder.path / "slurm.log"


def path(folder: RunFolder) -> Path:
    """Return the path of the batch script."""
    return folder.path / "slurm.sbatch"


def submit(folder: RunFolder, environment: Mapping[str, str]) -> str:
    """Submit the script in the run folder, and return the job's number."""
    # sbatch's own variables, such as SBATCH_TIMELIMIT, count more than the script's lines, and its command line most.
    options = shlex.split(" ".join(re.findall("^#SBATCH (.*)", path(folder).read_text(encoding="utf-8"), re.MULTILINE)))
    words = ["sbatch", "--parsable", *options, str(path(folder))]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
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
            if log(folder).exists():
                with log(folder).open("rb") as text:
                    text.seek(shown)
                    new = text.read()
                sys.stdout.write(new.decode(errors="replace"))
                sys.stdout.flush()
                shown += len(new)
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


@dataclass(frozen=True)
class Partition:
    """A partition of the cluster."""

    name: str
    nodes: int
    gpus: int
    """Number of GPUs on the node with the fewest."""


def partitions(listing: str) -> Iterator[Partition]:
    """Yield the partitions in the output of `sinfo -h -o '%P|%D|%G'`, the default partition first."""
    found: dict[str, list[tuple[int, int]]] = {}
    for line in listing.split():
        name, nodes, resources = line.split("|")
        # gpu:8, gpu:h100:8(S:0-1), gpu:a100:4,gpu:h100:4; commas also separate other resources.
        gpus = sum(int(count) for count in re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", resources))
        found.setdefault(name, []).append((int(nodes), gpus))
    for name in sorted(found, key=lambda name: not name.endswith("*")):
        kinds = found[name]
        yield Partition(name.rstrip("*"), sum(nodes for nodes, _ in kinds), min(gpus for _, gpus in kinds))


def allocation(
    name: str, nodes: int | None, ranks: int | None, partition: str | None, limit: str | None, dry_run: bool
) -> Allocation:
    """Return the allocation to request from the cluster."""
    # https://slurm.schedmd.com/sbatch.html#OPT_time: minutes, minutes:seconds, hours:..., days-hours...
    if limit is not None and not re.fullmatch(r"(\d+-\d+(:\d+){0,2}|\d+(:\d+){0,2})", limit):
        raise UserError(f"--time: invalid time limit {limit}; write minutes, hours:minutes:seconds or days-hours.")
    if limit is not None and 0 < (seconds := seconds_of(limit)) <= WARNING:
        raise UserError(
            f"--time {limit}: SLURM reads it as {seconds} seconds, and the ranks save and end {WARNING} seconds before "
            "the limit; give more (30 is minutes, 2:00:00 hours, 1-0 a day), or 0 for no limit."
        )
    if partition is not None and not re.fullmatch(r"[\w.,-]+", partition):
        wrong = " ".join(dict.fromkeys(re.findall(r"[^\w.,-]", partition)))
        raise UserError(f"--partition {partition!r}: not a partition's name, because of {wrong!r}; sinfo lists them.")
    nodes = 1 if nodes is None else nodes
    known = None
    if shutil.which("sinfo") and shutil.which("sbatch"):
        try:
            known = list(partitions(ask("sinfo", "-h", "-o", "%P|%D|%G")))
        except UserError as error:
            if not dry_run:
                raise UserError(
                    f"--slurm: {error}\nThis machine reaches no SLURM cluster; use a login node, or --write-only to "
                    "write the job for one."
                ) from None
    elif not dry_run:
        raise UserError(
            "--slurm: sbatch is not installed here; use a login node, or --write-only to write the job for one."
        )
    if known is None:
        return Allocation(name, nodes, ranks or 1, True, partition, limit)
    there = {one.name: one for one in known}
    named = partition or next(iter(there), "")
    for one in named.split(","):  # the job starts in the first that has room
        if one not in there:
            raise UserError(f"--partition {one}: no such partition; this cluster has {', '.join(there) or 'none'}.")
    wanted = [there[one] for one in named.split(",")]
    most, gpus = max(one.nodes for one in wanted), min(one.gpus for one in wanted)
    if not gpus and any(one.gpus for one in wanted):
        raise UserError(f"--partition {named}: some have GPUs and others none; name those of one kind.")
    if nodes > most:
        raise UserError(f"--nodes {nodes}: partition {named} has only {most}.")
    if gpus and ranks and ranks > gpus:
        raise UserError(f"--gpus {ranks}: nodes in partition {named} have only {gpus}.")
    return Allocation(name, nodes, ranks or gpus or 2, gpus > 0, partition, limit)


def seconds_of(limit: str) -> int:
    """Return a time limit of sbatch in seconds: without days one colon separates minutes and seconds."""
    days, _, rest = limit.rpartition("-")
    units = (3600, 60, 1) if days or rest.count(":") == 2 else (60, 1)
    return 86400 * int(days or 0) + sum(
        unit * int(number) for unit, number in zip(units, rest.split(":"), strict=False)
    )


def ask(*command: str) -> str:
    """Return the output of a SLURM command, or refuse with the last line of its error."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["failed"])[-1]
        raise UserError(f"{command[0]}: {last.removeprefix(f'{command[0]}: ')}")
    return done.stdout
