"""Means of the numbers that a method's trainer logs for its training examples: over all ranks, since the last log."""

import torch

from .. import distributed
from ..data.collate import FILLER, Batch
from ..trainer import RunContext, RunHooks


class Averages:
    """Adds up numbers on the device, and reads and exchanges them only when they are logged.

    TRL's trainers gather and read every number at every pass, and each read waits for the device.
    """

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.counts: dict[str, torch.Tensor] = {}
        self.paused = False

    def begin(self, counts: bool) -> None:
        """Begin a micro-batch, whose numbers are left out unless it counts: it may only fill a step."""
        self.paused = not counts

    def add(self, values: dict[str, torch.Tensor], counted: torch.Tensor | None = None) -> None:
        """Add numbers of examples, on every rank under the same names.

        A value has one number per example, or one for all; booleans select the `counted` examples.
        """
        for name, value in values.items():
            kept = torch.ones_like(value, dtype=torch.bool) if counted is None else counted
            kept = kept & (not self.paused)
            self.sums[name] = self.sums.get(name, 0.0) + (value.detach().float() * kept).sum()
            self.counts[name] = self.counts.get(name, 0) + kept.sum()

    def take(self) -> dict[str, float]:
        """Return the means over the counted examples by name, and start again; a collective."""
        if not self.sums:
            return {}
        read = torch.stack([*self.sums.values(), *(count.float() for count in self.counts.values())]).tolist()
        added = distributed.total(*read)
        sums, counts = added[: len(self.sums)], added[len(self.sums) :]
        means = {name: of / count for name, of, count in zip(self.sums, sums, counts, strict=True) if count}
        self.sums, self.counts = {}, {}
        return means


class Averaging(RunHooks):
    """A trainer that logs `self.averages`, to which its loss adds."""

    def __init__(self, context: RunContext, **options: object) -> None:
        """`options` are passed to the trainer's own class."""
        self.averages = Averages()
        super().__init__(context, **options)

    def training_step(self, model: torch.nn.Module, inputs: Batch, *arguments: object) -> torch.Tensor:
        """Return the loss of a micro-batch, whose numbers count unless it only fills the step."""
        self.averages.begin(counts=FILLER not in inputs)
        return super().training_step(model, inputs, *arguments)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the averages with the loss."""
        super().log(logs | self.averaged() if "loss" in logs else logs, start_time)

    def averaged(self) -> dict[str, float]:
        """Return the numbers to log, and start again; a collective."""
        return self.averages.take()
