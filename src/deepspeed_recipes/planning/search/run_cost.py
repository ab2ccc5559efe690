"""How long a run takes, and what it costs."""

import math
from dataclasses import dataclass, field

from ..hardware.prices import Prices
from .plans import Plan

RESTART = 0.25
"""Hours from an interruption to the first step after it: another node, the ranks, the weights. An assumption."""
HOPELESS = 50.0
"""Interruptions within one interval between checkpoints, on average, from which on a run makes no progress."""


def in_words(hours: float) -> str:
    """Return a time as people say it: `40 min`, `4.6 h`."""
    return f"{hours:,.1f} h" if hours >= 1 else f"{max(1, round(60 * hours))} min"


@dataclass(frozen=True)
class Workload:
    """How much is to be trained, and what nodes cost."""

    tokens: float
    """In all, over every epoch."""
    prices: Prices = field(default_factory=Prices)
    about: str = ""
    """How the tokens were found, where the user has not said them."""
    document_length: float | None = None
    """Of the document that a token is in, on average, where the data was read."""
    node_hours: float | None = None
    """For which a node runs until it is interrupted, on average, as spot instances are; None: it never is."""

    def hours(self, plan: Plan) -> float:
        """Return how long a plan trains, without loading, evaluation and checkpoints, but with interruptions."""
        return self.training_hours(plan) + self.interrupted_hours(plan)

    def steps(self, plan: Plan) -> int:
        """Return how many optimizer steps a plan makes of it."""
        return math.ceil(self.tokens / plan.setup.tokens_per_step)

    def training_hours(self, plan: Plan) -> float:
        """Return how long it trains if nothing interrupts it."""
        return self.tokens / (plan.speed * plan.setup.world_size) / 3600

    def interrupted_hours(self, plan: Plan) -> float:
        """Return the hours of restarts, and of steps that are done again from the newest checkpoint.

        Interruptions come independently of each other, and any node's interrupts all: J. T. Daly 2006, equation 13
        (doi:10.1016/j.future.2004.11.016), without the time to write a checkpoint.
        """
        if self.node_hours is None:
            return 0.0
        training, mean = self.training_hours(plan), self.node_hours / plan.cluster.nodes
        interval = min(training, (plan.recipe.save_steps or math.inf) * plan.time.seconds / 3600)
        each = (mean + RESTART) * math.expm1(min(interval / mean, HOPELESS))
        return training / interval * each - training

    def dollars(self, plan: Plan) -> float | None:
        """Return what the nodes cost for so long; None where their price is unknown."""
        hourly = self.prices.per_hour(plan.cluster)
        return None if hourly is None else hourly * self.hours(plan)
