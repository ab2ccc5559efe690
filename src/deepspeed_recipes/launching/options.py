"""A run's options as `ds-recipes launch` has read them, and the share of a cluster that they request."""

from dataclasses import dataclass
from pathlib import Path

from ..recipe.errors import UserError

ENGINES = ("hostfile", "slurm", "kubernetes", "ray", "sagemaker", "skypilot", "prepare")
"""Options that select how the ranks are started; a run has at most one of them."""
NEEDS = {
    "nodes": ENGINES,
    **dict.fromkeys(("address", "submit"), ("ray",)),
    **dict.fromkeys(("include", "exclude", "master_addr"), ("hostfile",)),
    **dict.fromkeys(("partition", "time", "account", "mem", "shared", "sbatch", "write_only"), ("slurm",)),
    "image": ("kubernetes", "sagemaker", "skypilot"),
    "volume": ("kubernetes", "skypilot"),
}
"""Options for several machines, each with the options of which it needs one."""

IMAGE = "deepspeed-recipes:latest"
"""The default container image of a job."""
VOLUME = "runs"
"""The default volume that the nodes of a job share."""


@dataclass(frozen=True)
class LaunchOptions:
    """The command line of `ds-recipes launch`, whose help describes each option."""

    recipe: str
    variant: str
    overrides: tuple[str, ...] = ()
    model: str | None = None
    """The folder or Hub id of a model without a page (`auto MODEL`)."""
    words: tuple[str, ...] = ()
    """The whole command line, for a launcher that runs elsewhere."""
    gpus: int | None = None
    output_dir: Path | None = None
    resume: bool = False
    max_restarts: int | None = None
    """If None, the default of the place where the run starts."""
    profile: str | None = None
    nsys: bool = False
    draft: bool = False
    no_plan: bool = False
    dry_run: bool = False
    whole_recipe: bool = False
    """A dry run prints the whole recipe, not only what differs from the page."""
    hostfile: Path | None = None
    include: str = ""
    exclude: str = ""
    nodes: int | None = None
    master_addr: str | None = None
    slurm: bool = False
    partition: str | None = None
    time: str | None = None
    account: str | None = None
    mem: str | None = None
    shared: bool = False
    sbatch: str | None = None
    write_only: bool = False
    kubernetes: bool = False
    ray: bool = False
    address: str | None = None
    submit: bool = False
    sagemaker: bool = False
    skypilot: bool = False
    prepare: bool = False
    image: str | None = None
    volume: str | None = None

    @property
    def engine(self) -> str | None:
        """The option of ENGINES that is set, or None for ranks on this machine."""
        return next((name for name in ENGINES if getattr(self, name)), None)

    def check(self) -> None:
        """Refuse options that contradict each other, or that would be ignored."""
        for name in ("nodes", "gpus"):
            if (given := getattr(self, name)) is not None and given < 1:
                raise UserError(f"--{name} {given}: must be at least 1.")
        used = [name for name in ENGINES if getattr(self, name)]
        if len(used) > 1:
            raise UserError(f"--{used[0]} and --{used[1]}: give one of them, not both.")
        if self.resume and self.engine in ("kubernetes", "sagemaker", "skypilot"):
            again = "kubectl replace --force -f FILE" if self.kubernetes else "the command that started it"
            raise UserError(f"--{self.engine} --resume: a job resumes by itself; start it again with {again}.")
        if self.prepare and self.max_restarts:
            raise UserError("--max-restarts: with --prepare your own launcher restarts the ranks, which then resume.")
        for name, needs in NEEDS.items():
            if getattr(self, name) and self.engine not in needs:
                *others, last = [f"--{need}" for need in needs]
                either = f"{', '.join(others)} or {last}" if others else last
                raise UserError(f"--{name.replace('_', '-')} needs {either}.")


@dataclass(frozen=True)
class Allocation:
    """A run's share of a cluster."""

    name: str
    """The job's name."""
    nodes: int
    ranks_per_node: int
    gpus: bool
    """True if each rank has a GPU."""
    partition: str | None = None
    time: str | None = None
    restarts: int = 0
    """Maximum number of restarts after a crash or a hang."""
    account: str | None = None
    mem: str | None = None
    """Host memory per node in SLURM's form."""
    shared: bool = False
    """Take a part of each node, which other jobs may share."""
    more: tuple[tuple[str, ...], ...] = ()
    """Further options for sbatch, each in words."""

    @property
    def ranks(self) -> int:
        """The world size."""
        return self.nodes * self.ranks_per_node
