"""A Ray cluster for the launcher: selects a run's nodes, supervises the run's attempts there, or submits a job.

Ray itself is imported only in the processes that are started from here. Without `--address` the run starts its own
cluster on this machine, which ends with the run. In a job the launcher itself runs on the head of the cluster behind
the dashboard's address; the nodes have the checkout, the environment and the current folder at the same paths, as hosts
over ssh do.
"""

import contextlib
import importlib.util
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from select import select

from ...recipe.errors import UserError, redact
from ...recipe.files import Json
from ...recipe.project import python_path
from ...recipe.run_folder import RunFolder
from .. import command
from ..command import rank_count, rank_environment, record, visible_gpus
from ..options import LaunchOptions
from ..ssh import remote
from ..ssh.hostfile import HostPool
from ..supervise import FailedRank, Outcome, supervise
from . import rank

LOCAL = "local"
"""The address that makes Ray start a cluster on this machine."""
VERSION = "2.60.0"
"""The version that the tests use."""
REACH = 5
"""Seconds within which the address must answer."""
ANSWER = 300
"""Time limit of a query of the whole cluster, in seconds."""


@dataclass(frozen=True)
class Node:
    """A node of a cluster."""

    id: str
    """Ray's id of the node."""
    name: str
    """The node's address, with the beginning of its id if another node has the same address."""
    cpus: int
    gpus: int


@dataclass(frozen=True)
class RayCluster:
    """The nodes of a run, and its number of ranks per node."""

    address: str
    nodes: tuple[Node, ...]
    """The nodes; empty for a cluster that is started here."""
    most_ranks: int
    on_gpus: bool

    @property
    def ranks(self) -> int:
        """The world size."""
        return self.most_ranks * max(1, len(self.nodes))

    @property
    def pool(self) -> HostPool:
        """The nodes as hosts, for the same checks."""
        return HostPool({node.name: tuple(range(self.most_ranks)) for node in self.nodes}, Path(self.address))


def of(options: LaunchOptions) -> RayCluster | None:
    """Return the nodes that the options select, or None without `--ray`; refuse an address that is not a cluster's."""
    if not options.ray:
        return None
    check_installed()
    address = options.address or os.environ.get("RAY_ADDRESS") or LOCAL
    if address == LOCAL:
        if (options.nodes or 1) > 1:
            raise UserError(
                f"--nodes {options.nodes}: --ray alone uses this machine; add --address HOST:6379, a cluster's."
            )
        gpus = visible_gpus()
        return RayCluster(LOCAL, (), rank_count(options.gpus, gpus), gpus > 0)
    if address != "auto":
        if "://" in address:
            raise UserError(
                f"--address {address}: write HOST:6379, a cluster that this machine is part of, or http://HOST:8265, "
                "its dashboard, to submit a job."
            )
        host, _, port = address.rpartition(":")
        if not host or not re.fullmatch(r"\d{1,5}", port) or int(port) > 65535:
            raise UserError(
                f"--address {address}: write HOST:PORT as `ray start` prints it, auto, or http://HOST:8265."
            )
        try:  # Ray would try for a minute
            socket.create_connection((host.strip("[]"), int(port)), timeout=REACH).close()
        except OSError as error:
            why = error.strerror or str(error)
            raise UserError(
                f"--address {address}: {why}; start Ray there (ray start --head), or correct the address."
            ) from None
    return selected(address, nodes_of(ask(address)), options.nodes, options.gpus)


def selected(address: str, nodes: list[Node], count: int | None, ranks: int | None) -> RayCluster:
    """Return the first `count` nodes with room for `ranks` ranks each; refuse a cluster that has fewer.

    Without `count` all such nodes are taken; without `ranks` each node runs as many as the smallest node can.
    """
    on_gpus = any(node.gpus for node in nodes)
    what = "GPUs" if on_gpus else "CPUs"

    def room(node: Node) -> int:
        return node.gpus if on_gpus else node.cpus

    usable = [node for node in nodes if room(node) >= (ranks or 1)]
    if not usable or len(usable) < (count or 1):
        there = ", ".join(f"{node.name} {room(node)}" for node in nodes)
        asked = " ".join(f"--{name} {number}" for name, number in (("nodes", count), ("gpus", ranks)) if number)
        raise UserError(f"{asked or '--ray'}: the Ray cluster at {address} has fewer {what} ({there}).")
    usable = usable[:count]
    return RayCluster(address, tuple(usable), ranks or min(map(room, usable)), on_gpus)


def check_installed() -> None:
    """Raise UserError, with the command that installs Ray, if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UserError(f'--ray: Ray is not installed here; pip install "ray[train]=={VERSION}" (make ray).')


def nodes_of(found: list[Json]) -> list[Node]:
    """Return the nodes that `ray.nodes` has listed, with a name for each."""
    several = {address for address, count in Counter(one["address"] for one in found).items() if count > 1}
    names = [f"{one['address']}-{one['id'][:6]}" if one["address"] in several else one["address"] for one in found]
    return [Node(one["id"], name, one["cpus"], one["gpus"]) for one, name in zip(found, names, strict=True)]


def ask(address: str, *about: str) -> list[Json]:
    """Return the nodes that `ray.nodes` prints."""
    command = [sys.executable, "-m", "deepspeed_recipes.launching.ray.nodes", address, *about]
    try:
        done = subprocess.run(command, env=environment(os.environ), capture_output=True, text=True, timeout=ANSWER)
    except subprocess.TimeoutExpired:
        raise UserError(f"--address {address}: the cluster does not answer within {ANSWER} s.") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise UserError(f"--address {address}: not a Ray cluster that this machine can use: {last}")
    answer = json.loads(lines[-1])
    if "failed" in answer:
        raise UserError(f"--address {address}: {answer['failed']}")
    nodes: list[Json] = answer["nodes"]
    return nodes


def environment(ours: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process that uses Ray, with usage statistics off unless the user turned them on.

    On a cluster that is started here Ray would also lower the priority of its workers, and so of the ranks, which would
    then wait for all other processes; the variables prevent that.
    """
    defaults = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    return defaults | dict(ours) | python_path(ours)


def attempt_command(cluster: RayCluster, run: RunFolder, ranks: int) -> list[str]:
    """Return the command of the process that runs an attempt."""
    words = [sys.executable, "-m", "deepspeed_recipes.launching.ray.train", str(run.path), "--address", cluster.address]
    words += ["--ranks", str(ranks), "--each", str(cluster.most_ranks), *(["--gpus"] if cluster.on_gpus else [])]
    return words + (["--nodes", ",".join(node.id for node in cluster.nodes)] if cluster.nodes else [])


SHELL = '$`"\\'
"""Characters that the shell interprets despite the double quotes with which Ray quotes a job's words."""


def submit_job(address: str, words: Sequence[str], submit: bool) -> int:
    """Print the command that runs the launcher with `words` on the cluster; with `submit` run it. Return its status.

    Refuses a word that Ray or the shell would change on its way to the launcher.
    """
    given = command.forwarded(os.environ) | python_path({})
    job = ["env", "-C", os.getcwd(), *(f"{name}={value}" for name, value in given.items())]
    own, skip = [], False  # without `--address A` and `--submit`
    for word in words:
        if not skip and word != "--submit" and not word.startswith("--address"):
            own.append(word)
        skip = word == "--address"
    job += [sys.executable, "-m", "deepspeed_recipes.commands", "launch", *own, "--address", "auto"]
    for word in words:
        if redact(word) != word:
            raise UserError(f"{redact(word)}: its credential could be read in the Ray job's command; leave it out.")
    for word in job:
        if set(word) & set(SHELL):
            raise UserError(f"{word}: a Ray job's words may not have {' '.join(SHELL)}; choose another name or value.")
    ray = Path(sys.executable).with_name("ray")
    ready = [str(ray) if ray.exists() else "ray", "job", "submit", "--address", address, "--", *job]
    print(redact(shlex.join(ready)), flush=True)
    if submit:
        check_installed()
    return subprocess.run(ready).returncode if submit else 0


class RayAttempts:
    """The attempts of a run on a Ray cluster."""

    def __init__(self, cluster: RayCluster, run: RunFolder) -> None:
        """Check that every node can take part."""
        self.cluster = self.alive = cluster
        self.run = run
        gpus = cluster.most_ranks if cluster.on_gpus else 0
        self.environment = environment(rank_environment(cluster.most_ranks, gpus, here=False))
        if cluster.nodes:
            answers = remote.check_hosts(cluster.pool, run.path, self.answers)
            self.environment |= remote.network_interfaces(answers, self.environment)

    def answers(self, folder: Path, file: str) -> list[remote.Answer]:
        """Return each node's facts; `file` has just been written to `folder`."""
        found = ask(self.cluster.address, str(folder), file, self.environment["TORCH_EXTENSIONS_DIR"])
        by_id = {one["id"]: one["answer"] for one in found}
        return [by_id.get(node.id, {"failed": "no longer there"}) for node in self.cluster.nodes]

    def start(self, ranks: int) -> Outcome:
        """Run that many ranks to their end."""
        rank.failures(self.run).unlink(missing_ok=True)
        attempt = attempt_command(self.alive, self.run, ranks)
        record(self.run, attempt)
        return supervise(attempt, self.environment, self.run, ranks, lambda launcher: RayWatcher(launcher, self.run))

    def available(self) -> int:
        """Return the number of ranks that could be started now; a lost node may be back."""
        if not self.cluster.nodes:
            return self.cluster.most_ranks
        folder = str(self.run.path.parent)
        found = ask(self.cluster.address, folder, uuid.uuid4().hex, self.environment["TORCH_EXTENSIONS_DIR"])
        answering = [one for one in found if "failed" not in one["answer"]]
        asked = len(self.cluster.nodes)
        usable = selected(self.cluster.address, nodes_of(answering), None, self.cluster.most_ranks)
        self.alive = replace(usable, nodes=usable.nodes[:asked], on_gpus=self.cluster.on_gpus)
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
        if self.read or not rank.failures(self.run).exists():
            return []
        self.read = True
        return [FailedRank(**one) for one in json.loads(rank.failures(self.run).read_text(encoding="utf-8"))]

    def signal(self, number: int) -> None:
        """Send a signal to the attempt's process, which forwards it to the ranks."""
        os.kill(self.launcher, number)

    def close(self) -> None:
        """Stop watching."""
