"""What a method's trainer reports of its training examples: means over all ranks since the last log."""

import torch

from .. import distributed


class Averages:
    """Adds up numbers on the device, and reads and exchanges them only when they are logged.

    TRL's trainers gather and read every number at every pass, and each read waits for the device.
    """

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.examples = 0

    def add(self, examples: int, **values: torch.Tensor) -> None:
        """Add sums over `examples` examples, on every rank under the same names."""
        self.examples += examples
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value.detach().sum()

    def take(self) -> dict[str, float]:
        """Return the means as `rewards/NAME` and start again; a collective."""
        if not self.sums:
            return {}
        examples, *sums = distributed.total(self.examples, *(value.item() for value in self.sums.values()))
        means = {f"rewards/{name}": value / examples for name, value in zip(self.sums, sums, strict=True)}
        self.sums, self.examples = {}, 0
        return means
