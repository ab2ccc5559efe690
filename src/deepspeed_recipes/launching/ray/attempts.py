"""The attempts of a run on a Ray cluster, each of which is a supervised process that trains with Ray."""

import contextlib
import json
import os
import uuid
from dataclasses import replace
from pathlib import Path
from select import select

from ...recipe.run_folder import RunFolder
from ..command import rank_environment, record
from ..ssh import host_checks
from ..supervise import FailedRank, Outcome, supervise
from . import output
from .cluster import RayCluster, ask, command, nodes_of, selected
from .cluster import environment as cluster_environment


class RayAttempts:
    """The attempts of a run on a Ray cluster."""

    def __init__(self, cluster: RayCluster, run: RunFolder) -> None:
        """Check the nodes.

        Raises:
            UserError: a node cannot take part.
        """
        self.cluster = self.alive = cluster
        self.run = run
        ranks = rank_environment(cluster.most_ranks, cluster.most_ranks if cluster.on_gpus else 0)
        if "OMP_NUM_THREADS" not in os.environ:
            del ranks["OMP_NUM_THREADS"]  # it is for this machine; each node counts its own cores
        self.environment = cluster_environment(ranks)
        if cluster.nodes:
            answers = host_checks.check(cluster.pool, run.path, self.answers)
            self.environment |= host_checks.network_interfaces(answers, self.environment)

    def answers(self, folder: Path, file: str) -> list[host_checks.Answer]:
        """Return each node's facts; `file` has just been written to `folder`."""
        found = ask(self.cluster.address, str(folder), file, self.environment["TORCH_EXTENSIONS_DIR"])
        by_id = {one["id"]: one["answer"] for one in found}
        return [by_id.get(node.id, {"failed": "no longer there"}) for node in self.cluster.nodes]

    def start(self, ranks: int) -> Outcome:
        """Run that many ranks to their end."""
        output.failures(self.run).unlink(missing_ok=True)
        attempt = command(self.alive, self.run, ranks)
        record(self.run, attempt)
        return supervise(attempt, self.environment, self.run, ranks, lambda launcher: RayWatcher(launcher, self.run))

    def available(self) -> int:
        """Return the number of ranks that could be started now; a lost node may be back.

        Raises:
            UserError: no node answers.
        """
        if not self.cluster.nodes:
            return self.cluster.most_ranks
        folder = str(self.run.path.parent)
        found = ask(self.cluster.address, folder, uuid.uuid4().hex, self.environment["TORCH_EXTENSIONS_DIR"])
        answering = [one for one in found if "failed" not in one["answer"]]
        asked = len(self.cluster.nodes)
        self.alive = replace(
            selected(self.cluster.address, nodes_of(answering), None, self.cluster.most_ranks),
            on_gpus=self.cluster.on_gpus,
        )
        self.alive = replace(self.alive, nodes=self.alive.nodes[:asked])
        if len(self.alive.nodes) < asked:
            print(f"continuing on {', '.join(node.name for node in self.alive.nodes)}", flush=True)
        return self.alive.ranks


class RayWatcher:
    """Watches an attempt on a Ray cluster: Ray detects failures, and the attempt's process writes them to a file."""

    def __init__(self, launcher: int, run: RunFolder) -> None:
        """`launcher` is the process id of the attempt."""
        self.launcher = launcher
        self.run = run
        self.read = False

    def failed(self, seconds: float) -> list[FailedRank]:
        """Wait at most that long, and return the ranks that have failed and the nodes that were lost meanwhile."""
        with contextlib.suppress(ProcessLookupError):
            ended = os.pidfd_open(self.launcher)
            select([ended], [], [], seconds)
            os.close(ended)
        if self.read or not output.failures(self.run).exists():
            return []
        self.read = True
        return [FailedRank(**one) for one in json.loads(output.failures(self.run).read_text(encoding="utf-8"))]

    def signal(self, number: int) -> None:
        """Send a signal to the attempt's process, which forwards it to the ranks."""
        os.kill(self.launcher, number)

    def close(self) -> None:
        """Stop watching."""
