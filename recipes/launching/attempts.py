"""The attempts of one run: each starts DeepSpeed's launcher with the machines that are left."""

from recipes.launching import hosts, survey
from recipes.launching.command import deepspeed_command, rank_environment, record, visible_gpus
from recipes.launching.supervise import Ended, supervise
from recipes.spec.errors import UserError
from recipes.spec.run_folder import RunFolder


class OnThisMachine:
    """Attempts on the machine that the launcher runs on."""

    def __init__(self, run: RunFolder, ranks: int, gpus: int) -> None:
        """`ranks`: of the first attempt; `gpus`: how many there are, 0 for ranks on the CPU."""
        self.run = run
        self.ranks = ranks
        self.gpus = gpus

    def start(self, ranks: int) -> Ended:
        """Run that many ranks to their end."""
        command = deepspeed_command(self.run, ranks)
        record(self.run, command)
        return supervise(command, rank_environment(ranks, self.gpus), self.run, ranks)

    def available(self) -> int:
        """Return how many ranks could be started now."""
        return visible_gpus() if self.gpus else self.ranks


class OverHosts:
    """Attempts on the hosts of a pool, after the pre-flight has found that all of them can take part."""

    def __init__(self, pool: hosts.Pool, run: RunFolder, master: str | None) -> None:
        """Ask the hosts; `master`: the address that was asked for.

        Raises:
            UserError: a host cannot take part.
        """
        environment = rank_environment(pool.widest, 0)
        reports = survey.check(pool, run.path, master, environment["TORCH_EXTENSIONS_DIR"])
        environment = rank_environment(pool.widest, len(reports[0]["gpus"]))
        self.environment = environment | survey.interfaces(reports, environment)
        self.addresses = {host: report["address"] for host, report in zip(pool.hosts, reports, strict=True)}
        self.run = run
        self.pool = self.alive = pool
        self.master = master

    def start(self, ranks: int) -> Ended:
        """Run that many ranks to their end, on the first hosts that are left."""
        taken = hosts.taking(self.alive, ranks)
        first = taken.hosts[0]
        # The address that was asked for is the first host's, and leads nowhere when that one is gone.
        master = self.master if self.master and first == self.pool.hosts[0] else self.addresses[first]
        command = deepspeed_command(self.run, ranks, taken, master)
        record(self.run, command)
        return hosts.supervised(taken, self.run, command, self.environment)

    def available(self) -> int:
        """Return how many ranks could be started now; a host that was gone may be back.

        Raises:
            UserError: no host answers.
        """
        self.alive = hosts.reachable(self.pool, self.run)
        lost = [host for host in self.pool.hosts if host not in self.alive.hosts]
        if not self.alive.hosts:
            raise UserError(f"nothing to restart on: {', '.join(lost)} {'do' if lost[1:] else 'does'} not answer.")
        if lost:
            print(f"going on without {', '.join(lost)}", flush=True)
        return self.alive.ranks
