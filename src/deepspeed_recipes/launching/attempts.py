"""The attempts of a run, each of which starts DeepSpeed's launcher on this machine or on the hosts that answer."""

from pathlib import Path

from ..recipe.errors import UserError
from ..recipe.run_folder import RunFolder, read_recipe
from ..report.profiler import nsys
from .command import deepspeed_command, rank_environment, record, visible_gpus
from .ssh import host_checks, hostfile, remote, watchers
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
        if read_recipe(self.run).profile.nsys:
            self.run.profile.mkdir(exist_ok=True)
            command = [*nsys.command(self.run), *command]
        record(self.run, command)
        return supervise(command, rank_environment(ranks, self.gpus), self.run, ranks)

    def available(self) -> int:
        """Return the number of ranks that could be started now."""
        return visible_gpus() if self.gpus else self.ranks


class HostAttempts:
    """Attempts on several hosts, all of which have passed the checks."""

    def __init__(self, pool: HostPool, run: RunFolder, master: str | None) -> None:
        """Check the hosts; `master` is the rendezvous address, if the user has given one.

        Raises:
            UserError: a host cannot take part.
        """
        environment = rank_environment(pool.most_ranks, 0)
        extensions, meeting = environment["TORCH_EXTENSIONS_DIR"], master or pool.hosts[0]

        def ask(folder: Path, file: str) -> list[host_checks.Answer]:
            return host_checks.ask_by_ssh(pool, folder, file, meeting, extensions)

        answers = host_checks.check(pool, run.path, ask)
        environment = rank_environment(pool.most_ranks, len(answers[0]["gpus"]))
        self.environment = environment | host_checks.network_interfaces(answers, environment)
        self.addresses = {host: answer["address"] for host, answer in zip(pool.hosts, answers, strict=True)}
        self.run = run
        self.pool = self.alive = pool
        self.master = master

    def start(self, ranks: int) -> Outcome:
        """Run that many ranks to their end, on the first of the hosts that answer."""
        pool = hostfile.first_slots(self.alive, ranks)
        first = pool.hosts[0]
        # The user's address is the first host's, and is useless if that host is lost.
        master = self.master if self.master and first == self.pool.hosts[0] else self.addresses[first]
        command = deepspeed_command(self.run, ranks, pool, master)
        record(self.run, command)
        return watchers.supervise_hosts(pool, self.run, command, self.environment)

    def available(self) -> int:
        """Return the number of ranks that could be started now; a lost host may be back.

        Raises:
            UserError: no host answers.
        """
        self.alive = remote.reachable(self.pool, self.run)
        lost = [host for host in self.pool.hosts if host not in self.alive.hosts]
        if not self.alive.hosts:
            raise UserError(f"cannot restart: {', '.join(lost)} {'do' if lost[1:] else 'does'} not answer.")
        if lost:
            print(f"continuing without {', '.join(lost)}", flush=True)
        return self.alive.ranks
