"""Hourly prices of instances: list prices as of a date, and prices that the user gives instead.

List prices are on demand, without reservations, spot discounts or taxes, in the clouds' regions in the United States.
Instances whose price was not found are omitted. Prices change, so `--price` overrides them.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from ...recipe.errors import UserError
from .cluster import Cluster, instance_name
from .gpus import Gpu
from .instances import INSTANCES

DATE = "2026-09"
"""Month in which the prices were recorded."""

# AWS Price List, offer files of us-east-1, version 20260924; p5.4xlarge, p6-b200 and g7e: us-east-2, July 2026.
_AWS = {
    "p3.2xlarge": 3.06,
    "p3.8xlarge": 12.24,
    "p3.16xlarge": 24.48,
    "p4d.24xlarge": 21.957642,
    "p4de.24xlarge": 27.44705,
    "p5.4xlarge": 6.88,
    "p5.48xlarge": 55.04,
    "p5en.48xlarge": 63.296,
    "p6-b200.48xlarge": 113.9328,
    "g4dn.xlarge": 0.526,
    "g4dn.12xlarge": 3.912,
    "g5.xlarge": 1.006,
    "g5.2xlarge": 1.212,
    "g5.4xlarge": 1.624,
    "g5.8xlarge": 2.448,
    "g5.16xlarge": 4.096,
    "g5.12xlarge": 5.672,
    "g5.24xlarge": 8.144,
    "g5.48xlarge": 16.288,
    "g6.xlarge": 0.8048,
    "g6.12xlarge": 4.6016,
    "g6.48xlarge": 13.3504,
    "g6e.xlarge": 1.861,
    "g6e.12xlarge": 10.49264,
    "g6e.24xlarge": 15.06559,
    "g6e.48xlarge": 30.13118,
    "g7e.2xlarge": 3.3631,
    "g7e.12xlarge": 8.2861,
    "g7e.24xlarge": 16.5722,
    "g7e.48xlarge": 33.1443,
}
# https://cloud.google.com/compute/all-pricing, us-central1.
_GOOGLE = {
    "a2-highgpu-1g": 3.673385,
    "a2-highgpu-2g": 7.34677,
    "a2-highgpu-4g": 14.69354,
    "a2-highgpu-8g": 29.38708,
    "a2-ultragpu-1g": 5.06879789,
    "a2-ultragpu-2g": 10.137595781,
    "a2-ultragpu-4g": 20.275191562,
    "a2-ultragpu-8g": 40.550383123,
    "a3-highgpu-8g": 88.490000119,
}
# https://prices.azure.com/api/retail/prices, eastus, 2026-08-17.
_AZURE = {"ND96asr_v4": 27.197, "ND96isr_H100_v5": 98.32}

LISTED: Mapping[str, float] = {**_AWS, **_GOOGLE, **_AZURE}
"""US dollars per hour of an instance."""


@dataclass(frozen=True)
class Prices:
    """Prices of nodes, from the user or from `LISTED`."""

    any_node: float | None = None
    """The user's price of the planned node, in US dollars per hour."""
    given: Mapping[str, float] = field(default_factory=dict)
    """The user's prices by instance; all others have the price in `LISTED`."""

    def per_hour(self, cluster: Cluster) -> float | None:
        """Return the price of all nodes of a cluster in US dollars per hour, or None if it is unknown."""
        node = self.any_node
        if node is None:
            node = self.given.get(cluster.instance, LISTED.get(cluster.instance))
        return None if node is None else node * cluster.nodes

    def known(self) -> list[str]:
        """Return the instances that have a price."""
        return [name for name in INSTANCES if name in self.given or name in LISTED]

    def instances(self, gpu: Gpu) -> list[str]:
        """Return the two smallest instances with this GPU and a price."""
        equipped = [name for name in self.known() if INSTANCES[name].gpu == gpu.name]
        return sorted(equipped, key=lambda name: INSTANCES[name].gpus)[:2]

    def source(self, cluster: Cluster) -> str:
        """Return the source of a cluster's price, as the end of a sentence."""
        own = self.any_node is not None or cluster.instance in self.given
        return "as given" if own else f"on demand, {DATE}; --price overrides it"


def prices(words: Iterable[str]) -> Prices:
    """Return the prices given with `--price`: `DOLLARS` for any node, or `INSTANCE=DOLLARS`.

    Raises:
        UserError: a word is not a price in dollars, names an unknown instance, or repeats an instance.
    """
    found: dict[str, float] = {}
    for word in words:
        name, equals, text = word.rpartition("=")
        price = _dollars(word, text)
        instance = instance_name(name) if equals else ""
        if instance is None:
            near = get_close_matches(name, INSTANCES, n=1)
            hint = f"did you mean {near[0]}?" if near else "the price of the planned node needs no name."
            raise UserError(f"--price {word}: there is no instance {name}; {hint}")
        if instance in found:
            what = instance or "a node"
            raise UserError(f"--price: two prices for {what}, {found[instance]:g} and {price:g}; give only one.")
        found[instance] = price
    return Prices(found.pop("", None), found)


def _dollars(word: str, text: str) -> float:
    number = re.fullmatch(r"\$?\s*([0-9.]+)\s*(?:\$|usd|dollars?)?", text.strip(), re.IGNORECASE)
    try:
        price = float(number[1]) if number else math.nan
    except ValueError:
        price = math.nan
    if math.isnan(price) or not price:
        if re.fullmatch(r"\$?\s*\d+,\d{1,2}", text.strip()):
            raise UserError(f"--price {word}: use a decimal point: {text.strip().replace(',', '.')}.")
        other = re.search(r"[€£¥₹]|\b(?!usd\b)[a-z]{3}\b|(?<=\d)(?!usd\b)[a-z]{3}\b", text.lower())
        what = f"{other[0].upper()} is not supported, convert it;" if other else "not a price;"
        raise UserError(f"--price {word}: {what} give US dollars per hour of one node, such as --price 2.50.")
    return price
