"""The nodes, ranks and time that a run requests from a cluster."""

from dataclasses import dataclass


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
    """Maximum number of restarts after a crash or a hang, or 0 for the cluster's default."""

    @property
    def ranks(self) -> int:
        """The world size."""
        return self.nodes * self.ranks_per_node
