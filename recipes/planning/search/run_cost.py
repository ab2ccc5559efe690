"""How long a run takes, and what it costs."""

from dataclasses import dataclass, field

from ..hardware.prices import Prices
from .plans import Plan


@dataclass(frozen=True)
class Workload:
    """How much is to be trained, and what nodes cost."""

    tokens: float
    """In all, over every epoch."""
    prices: Prices = field(default_factory=Prices)
    about: str = ""
    """How the tokens were found, where the user has not said them."""

    def hours(self, plan: Plan) -> float:
        """Return how long a plan trains, without loading, evaluation and checkpoints."""
        return self.tokens / (plan.speed * plan.setup.world_size) / 3600

    def dollars(self, plan: Plan) -> float | None:
        """Return what the nodes cost for so long; None where their price is unknown."""
        hourly = self.prices.per_hour(plan.cluster)
        return None if hourly is None else hourly * self.hours(plan)
