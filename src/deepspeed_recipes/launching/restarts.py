"""The attempts of a run, and its restarts from the newest complete checkpoint, on the remaining ranks.

An attempt starts DeepSpeed's launcher on this machine or on the hosts that answer. DeepSpeed removed its elasticity in
0.19. This is simpler: the run ends and starts again as with `--resume`, through a universal checkpoint if the number of
ranks has changed. The global batch size stays the same.
"""

import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ..recipe import deepspeed_file, limits, run_folder
from ..recipe.errors import FileUnusable, UserError
from ..recipe.project import program
from ..recipe.recipe import Recipe
from ..recipe.run_folder import REWIND, RunFolder, append_jsonl, starting_recipe
from ..report.profiler import window
from ..training.checkpoint import digests, universal
from ..training.tracking import writer
from . import preflight
from .command import deepspeed_command, rank_environment, record, visible_gpus
from .ssh import hostfile, remote
from .ssh.hostfile import HostPool
from .supervise import Outcome, supervise


class LocalAttempts:
    """Attempts on this machine."""

    def __init__(self, run: RunFolder, ranks: int, gpus: int) -> None:
        """`ranks` is the number for the first attempt, and `gpus` the machine's number of GPUs, 0 for CPU ranks."""
        self.run = run
        self.ranks = ranks
        self.gpus = gpus

    def start(self, ranks: int) -> Outcome:
        """Run that many ranks to their end."""
        command = deepspeed_command(self.run, ranks)
        if starting_recipe(self.run).profile.nsys:
            self.run.profile.mkdir(exist_ok=True)
            command = [*window.nsys_command(self.run), *command]
        record(self.run, command)
        return supervise(command, rank_environment(ranks, self.gpus), self.run, ranks)

    def available(self) -> int:
        """Return the number of ranks that could be started now."""
        return visible_gpus() if self.gpus else self.ranks


class HostAttempts:
    """Attempts on several hosts, all of which have passed the checks."""

    def __init__(self, pool: HostPool, run: RunFolder, master: str | None) -> None:
        """Check that every host can take part; `master` is the rendezvous address, if the user has given one."""
        environment = rank_environment(pool.most_ranks, 0)
        ask = partial(remote.ask_by_ssh, pool, master or pool.hosts[0], environment["TORCH_EXTENSIONS_DIR"])
        answers = remote.check_hosts(pool, run.path, ask)
        environment = rank_environment(pool.most_ranks, len(answers[0]["gpus"]))
        self.environment = environment | remote.network_interfaces(answers, environment)
        self.addresses = {host: answer["address"] for host, answer in zip(pool.hosts, answers, strict=True)}
        self.run = run
        self.pool = self.alive = pool
        self.master = master

    def start(self, ranks: int) -> Outcome:
        """Run that many ranks to their end, on the first of the hosts that answer."""
        slots: dict[str, tuple[int, ...]] = {}
        left = ranks
        for host, there in self.alive.slots.items():
            if left:
                slots[host] = there[:left]
                left -= len(slots[host])
        pool = hostfile.with_slots(self.alive, slots)
        first = pool.hosts[0]
        # The user's address is the first host's, and is useless if that host is lost.
        master = self.master if self.master and first == self.pool.hosts[0] else self.addresses[first]
        command = deepspeed_command(self.run, ranks, pool, master)
        record(self.run, command)
        environment = remote.launcher_environment(self.run, self.environment)
        # No rank is a child process here, not even on this machine: pdsh starts them all through ssh.
        outcome = supervise(command, environment, self.run, pool.ranks, lambda _: remote.RemoteWatcher(pool, self.run))
        if outcome.status:
            remote.signal_ranks(pool, self.run, signal.SIGKILL)  # pdsh ends its ssh, which ends no process on the host
        return outcome

    def available(self) -> int:
        """Return the number of ranks that could be started now; a lost host may be back."""
        # Where a host answers, this also kills what is left of the last attempt.
        answers = remote.signal_ranks(self.pool, self.run, signal.SIGKILL)
        lost = [host for host, answer in zip(self.pool.hosts, answers, strict=True) if answer.returncode]
        slots = {host: there for host, there in self.pool.slots.items() if host not in lost}
        self.alive = hostfile.with_slots(self.pool, slots)
        if not slots:
            raise UserError(f"cannot restart: {', '.join(lost)} {'do' if lost[1:] else 'does'} not answer.")
        if lost:
            print(f"continuing without {', '.join(lost)}", flush=True)
        return self.alive.ranks


REWINDS = 10
"""Maximum number of rewinds of a run; `--max-restarts` counts only restarts after a failure."""


def check(recipe: Recipe, most: int) -> None:
    """Refuse restarts that would have no checkpoint to start from."""
    if most < 0:
        raise UserError(f"--max-restarts {most}: must be at least 0.")
    if most and not recipe.save_steps:
        raise UserError(
            f"--max-restarts {most}: save_steps=0 writes no checkpoints to restart from; add save_steps=100."
        )


def run_with_restarts(
    recipe: Recipe, run: RunFolder, ranks: int, most: int, start: Callable[[int], Outcome], available: Callable[[], int]
) -> int:
    """Run to the end, restarting after failures at most `most` times, and return the last exit status.

    `run` is prepared for the first start with `ranks` ranks. `start` runs an attempt with the given number of ranks to
    its end, and `available` returns the number that could be started now. Gives up without a
    checkpoint that some possible number of ranks can resume from.
    """
    asked, restarts, rewinds = ranks, 0, 0
    while True:
        outcome = start(ranks)
        if outcome.cause:
            print(f"{program('launch')}: {outcome.cause}", file=sys.stderr, flush=True)
        if outcome.stopped or outcome.status in (0, 2):
            return told(run, outcome)
        if outcome.status == REWIND:
            rewinds += 1
            if rewinds > REWINDS:
                raise UserError(f"rewound {REWINDS} times, so bad examples are not the cause; lower learning_rate.")
        elif restarts == most:
            return told(run, outcome)
        else:
            restarts += 1
        try:
            checkpoint = intact_checkpoint(recipe, run)
            ranks = largest_world_size(recipe, run, min(asked, available()))  # it can grow again if a host is back
            prepare(recipe, run, ranks, checkpoint)
        except UserError as error:
            writer.failed(run, "\n".join(filter(None, (outcome.cause, str(error)))), outcome.status)
            raise
        what = "rewinding" if outcome.status == REWIND else f"restart {restarts} of {most}"
        print(f"{what}: resuming from {checkpoint} with {ranks} ranks", flush=True)
        step = run_folder.step_of(checkpoint)
        append_jsonl(run.restarts, {"time": time.time(), "cause": outcome.cause, "from_step": step, "ranks": ranks})


def told(run: RunFolder, outcome: Outcome) -> int:
    """Send the run's end to the trackers, unless a rank has sent it, and return the exit status.

    A signal ends a run with a checkpoint and without an error, but what follows it in a shell (`launch ... && export`)
    must not continue: the status is then 130 after Ctrl-C and 143 after SIGTERM, also if only a rank got the signal.
    """
    if outcome.status:
        writer.failed(run, outcome.cause, outcome.status)
    elif not run_folder.is_finished(run):
        return 128 + (outcome.stopped or signal.SIGTERM)
    return outcome.status


def intact_checkpoint(recipe: Recipe, run: RunFolder) -> Path:
    """Return the newest checkpoint whose files all match their checksums; reads every file."""
    checkpoint = digests.newest_intact(run)
    if checkpoint is None:
        raise UserError(
            f"nothing to restart from: {run.checkpoints} has no complete checkpoint yet; lower save_steps "
            f"(now {recipe.save_steps})."
        )
    return checkpoint


def largest_world_size(recipe: Recipe, run: RunFolder, most: int) -> int:
    """Return the largest number of ranks, at most `most`, that can resume the run; if none can, say why."""
    file, known, reason = deepspeed_file.read(recipe.deepspeed), preflight.with_dimensions(recipe), None
    for ranks in range(most, 0, -1):
        try:
            limits.check(known, ranks, file)
            universal.check(recipe, run, file, ranks)
        except FileUnusable:  # fewer ranks would not help
            raise
        except UserError as error:
            reason = reason or error
        else:
            return ranks
    raise reason or UserError("cannot restart: no GPU is available.")


def prepare(recipe: Recipe, run: RunFolder, ranks: int, checkpoint: Path) -> None:
    """Convert the checkpoints to load if so many ranks need universal ones, and discard the steps after them."""
    with run_folder.explained(checkpoint):
        universal.convert_needed(recipe, run, ranks, checkpoint)
    run_folder.forget_after(run, checkpoint)
