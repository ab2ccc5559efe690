"""What a run asks a cluster for: nodes, ranks and time."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Allocation:
    """A run's share of a cluster."""

    name: str
    """Of the job."""
    nodes: int
    ranks_per_node: int
    gpus: bool
    """Whether each rank has a GPU."""
    partition: str | None = None
    time: str | None = None
    restarts: int = 0
    """How often the run may restart after a crash or a hang; 0: the cluster's default."""

    @property
    def ranks(self) -> int:
        """The world size."""
        return self.nodes * self.ranks_per_node
