"""Nodes that clouds rent out and makers sell, by the names under which they are ordered, with their hourly prices."""

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from ...recipe.errors import UserError

FILE = Path(__file__).with_name("instances.csv")


@dataclass(frozen=True)
class Instance:
    """One node."""

    gpu: str
    """A name in `gpus.GPUS`."""
    gpus: int
    host_memory_gib: float
    nvme_gib: float
    """Capacity of the local drives; 0 if there are none, or only on request."""
    network_gbits: float
    """Bandwidth to other nodes, in Gbit/s per direction, all cards together."""
    cores: int
    """CPU cores as the vendor counts them; in clouds, virtual cores."""
    dollars: float | None
    """List price per hour, or None if it was not found."""
    date: str
    """Month in which the price was recorded."""


def _gib(size: str) -> float:
    return float(size[:-2]) * 1e9 / 2**30 if size.endswith("GB") else float(size)


INSTANCES: Mapping[str, Instance] = {
    row["instance"]: Instance(
        row["gpu"],
        int(row["gpus"]),
        _gib(row["host_memory"]),
        _gib(row["nvme"]),
        float(row["network_gbits"]),
        int(row["cores"]),
        float(row["dollars"]) if row["dollars"] else None,
        row["date"],
    )
    for row in csv.DictReader(one for one in FILE.read_text(encoding="utf-8").splitlines() if not one.startswith("#"))
}


def instance_name(name: str) -> str | None:
    """Return the name of an instance in `INSTANCES`, ignoring case and Azure's prefix, or None if unknown."""
    known = {known.lower(): known for known in INSTANCES}
    return known.get(name.lower().removeprefix("standard_"))


@dataclass(frozen=True)
class Prices:
    """Prices of nodes, from the user or from `INSTANCES`."""

    given: Mapping[str, float] = field(default_factory=dict)
    """The user's, by instance or, as "", of the planned node, in US dollars per hour; others have their list price."""

    def of_node(self, instance: str) -> float | None:
        """Return the price of a node in US dollars per hour, or None if it is unknown; `instance` may be empty."""
        if "" in self.given or instance not in INSTANCES:
            return self.given.get("")
        return self.given.get(instance, INSTANCES[instance].dollars)

    def known(self) -> list[str]:
        """Return the instances that have a price."""
        return [name for name in INSTANCES if self.of_node(name) is not None]

    def source(self, instance: str) -> str:
        """Return the source of a node's price, as the end of a sentence."""
        own = {"", instance} & self.given.keys()
        return "as given" if own else f"on demand, {INSTANCES[instance].date}; --price overrides it"


def prices(words: Iterable[str]) -> Prices:
    """Return the prices given with `--price`: `DOLLARS` for any node, or `INSTANCE=DOLLARS`."""
    found: dict[str, float] = {}
    for word in words:
        name, equals, text = word.rpartition("=")
        number = re.fullmatch(r"\$?\s*([0-9]*\.?[0-9]+|[0-9]+\.)\s*(?:\$|usd|dollars?)?", text.strip(), re.IGNORECASE)
        price = float(number[1]) if number else 0.0
        if not price:
            raise UserError(f"--price {word}: not a price; give US dollars per hour of one node, such as --price 2.50.")
        instance = instance_name(name) if equals else ""
        if instance is None:
            near = get_close_matches(name, INSTANCES, n=1)
            hint = f"did you mean {near[0]}?" if near else "the price of the planned node needs no name."
            raise UserError(f"--price {word}: unknown instance {name}; {hint}")
        if instance in found:
            what = instance or "a node"
            raise UserError(f"--price: two prices for {what}, {found[instance]:g} and {price:g}; give only one.")
        found[instance] = price
    return Prices(found)
