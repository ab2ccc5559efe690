"""Duration and price of a run."""

import math
from dataclasses import dataclass, field

from ..hardware.cluster import Cluster
from ..hardware.instances import Prices
from .plans import Plan

RESTART = 0.25
"""Hours from an interruption to the next step: getting a node, starting the ranks, loading the weights. Assumed."""
HOPELESS = 50.0
"""Average number of interruptions per checkpoint interval above which a run makes no progress."""


def in_words(hours: float) -> str:
    """Return a duration in a readable unit: `40 min`, `4.6 h`."""
    return f"{hours:,.1f} h" if hours >= 1 else f"{max(1, round(60 * hours))} min"


@dataclass(frozen=True)
class Workload:
    """The amount of training, and the prices of nodes."""

    tokens: float
    """Total over all epochs."""
    prices: Prices = field(default_factory=Prices)
    about: str = ""
    """How the number of tokens was determined, if the user did not give it."""
    document_length: float | None = None
    """As in `TrainingSetup`; None if the data was not read."""
    node_hours: float | None = None
    """Average hours until a node is interrupted, for spot instances. None if nodes are never interrupted."""

    def hours(self, plan: Plan) -> float:
        """Return the hours of training, interruptions included; loading, evaluation and checkpoints are not."""
        return self.training_hours(plan) + self.interrupted_hours(plan)

    def steps(self, plan: Plan) -> int:
        """Return the number of optimizer steps."""
        return math.ceil(self.tokens / plan.setup.tokens_per_step)

    def training_hours(self, plan: Plan) -> float:
        """Return the hours of training without interruptions."""
        return self.tokens / (plan.speed * plan.setup.world_size) / 3600

    def interrupted_hours(self, plan: Plan) -> float:
        """Return the hours lost to restarts and to repeating the steps since the newest checkpoint.

        Interruptions are independent of each other, and an interruption of any node stops the whole run: J. T. Daly
        2006, equation 13 (doi:10.1016/j.future.2004.11.016), without the time to write a checkpoint.
        """
        if self.node_hours is None:
            return 0.0
        training, mean = self.training_hours(plan), self.node_hours / plan.cluster.nodes
        interval = min(training, (plan.recipe.save_steps or math.inf) * plan.time.seconds / 3600)
        each = (mean + RESTART) * math.expm1(min(interval / mean, HOPELESS))
        return training / interval * each - training

    def dollars(self, plan: Plan) -> float | None:
        """Return the price of the run in dollars, or None if the nodes' price is unknown."""
        hourly = self.per_hour(plan.cluster)
        return None if hourly is None else hourly * self.hours(plan)

    def per_hour(self, cluster: Cluster) -> float | None:
        """Return the price of all nodes of a cluster in US dollars per hour, or None if it is unknown."""
        node = self.prices.of_node(cluster.instance)
        return None if node is None else node * cluster.nodes
