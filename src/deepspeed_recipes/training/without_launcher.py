"""Replaces our launcher's work around the ranks where another launcher has started them, such as torchrun or mpirun.

Rank 0 does it: it keeps other writers out of the run folder, discards the records after the newest checkpoint and, at
the end, writes the verdict on recorded steps and the report. Restarts are left to the other launcher.
"""

import contextlib
import os
import re
import socket
from collections.abc import Iterator

from torch.distributed import DistNetworkError

from ..machine import ops, run_lock
from ..recipe import run_folder
from ..recipe.errors import UserError
from ..recipe.run_folder import RunFolder
from ..report import write
from ..report.profiler import verdict
from . import rendezvous
from .checkpoint import digests, universal

_LOST = re.compile(
    r"(?:(?:Read|Write) error|Connection closed by peer|Connection reset by peer) \[([^\]\s]+)\]:\d+"  # gloo
    r"|(?:remote process exited|closed by remote peer|peer) ([\w.:]+)<\d+>"  # NCCL
    r"|SocketImpl\(.*remote=\[?([\w.:]+)\]?:\d+\)|Gloo connectFullMesh failed"  # at the start
)
"""Matches the host, if it is named, in messages of gloo, NCCL and torch's store about a lost connection."""


@contextlib.contextmanager
def kept(run: RunFolder) -> Iterator[None]:
    """Keep the run's folder in order during a `with` block in every rank, unless our launcher watches the ranks.

    A finished run, one that another process writes, and one that cannot be resumed are refused.
    """
    if rendezvous.is_watched(os.environ):
        yield
        return
    if run_folder.is_finished(run):
        raise UserError(f"{run.path}: this run has already finished.")
    for name, value in ops.environment().items():
        os.environ.setdefault(name, value)
    if os.environ["RANK"] != "0":
        yield
        return
    # If rank 0 was moved to another host, it waits until its predecessor is known to be dead.
    with run_lock.hold(run.path, wait=2 * run_lock.SILENT):
        prepare(run, int(os.environ["WORLD_SIZE"]))
        try:
            yield
        finally:
            run_folder.discard_requested(run, recipe=False)
            verdict.at_end(run)
            write.at_end(run)


def lost_peer(error: BaseException) -> str | None:
    """Return a line that names the host to which a connection was lost, or None if the error has another cause.

    Without our launcher nothing watches the ranks, and an error raised by a library in the middle of a collective does
    not mention that another rank has died.
    """
    match = _LOST.search(str(error))
    if match is None and not isinstance(error, DistNetworkError):
        return None
    host = next(filter(None, match.groups()), None) if match else None
    rank, host = os.environ.get("RANK", "0"), host or "another rank"
    return (
        f"rank {rank} on {socket.gethostname()}: the connection to {host} was lost: it has died, or its host "
        "has; started again, the run resumes from its newest checkpoint."
    )


def prepare(run: RunFolder, world_size: int) -> None:
    """Prepare the folder for the first start, or for a restart after steps were lost, before any rank reads it."""
    checkpoint = digests.newest_intact(run)
    if checkpoint:
        print(f"resuming from {checkpoint}", flush=True)
        with run_folder.explained(checkpoint):
            universal.convert_needed(run_folder.starting_recipe(run), run, world_size, checkpoint)
    run_folder.forget_after(run, checkpoint)
