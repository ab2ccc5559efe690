"""The section with the utilisation of GPUs and nodes, from system.jsonl."""

from collections.abc import Iterator
from statistics import fmean

from ..document import Block, Cell, Chart, Curve, Number, Section, Table
from ..run_data import Row, RunData
from .curves import finite

GIGA = 1e9
OF_RANKS = {
    "gpu_utilization": ("GPU busy (%)", 1),
    "gpu_memory_utilization": ("GPU memory read or written (% of the time)", 1),
    "gpu_memory_gib": ("GPU memory in use, all processes (GiB)", 1),
    "gpu_power_watts": ("GPU power (W)", 1),
    "gpu_temperature_celsius": ("GPU temperature (degrees Celsius)", 1),
    "pcie_received_bytes_per_second": ("PCIe, received (GB/s)", GIGA),
    "pcie_sent_bytes_per_second": ("PCIe, sent (GB/s)", GIGA),
    "nvlink_received_bytes_per_second": ("NVLink, received (GB/s)", GIGA),
    "nvlink_sent_bytes_per_second": ("NVLink, sent (GB/s)", GIGA),
}
OF_NODES = {
    "cpu_utilization": ("Host CPU busy (%)", 1),
    "host_memory_gib": ("Host memory in use (GiB)", 1),
    "host_memory_percent": ("Host memory in use (%)", 1),
    "disk_read_bytes_per_second": ("Disks, read (GB/s)", GIGA),
    "disk_written_bytes_per_second": ("Disks, written (GB/s)", GIGA),
    "network_received_bytes_per_second": ("Network, received (GB/s)", GIGA),
    "network_sent_bytes_per_second": ("Network, sent (GB/s)", GIGA),
}
"""Keys of a sample, each with its title and divisor."""
MOST_CURVES = 6
"""Maximum number of curves in a chart; with more ranks it shows the lowest, the mean and the highest value."""
CHARTS = ("gpu_utilization", "gpu_memory_gib", "gpu_power_watts", "gpu_temperature_celsius", "cpu_utilization")
"""Keys that are drawn over time; the table contains all keys."""
MOST_ROWS = 40
"""Maximum number of rows of an unfolded table."""

Lines = dict[str, list[tuple[float, float]]]
"""(Minutes, value) pairs by rank or node."""


def sections(run: RunData) -> tuple[Section, ...]:
    """Return the section, or nothing if the run took no samples."""
    blocks = tuple(_blocks(run.system))
    return (Section("Hardware in use", blocks),) if blocks else ()


def _blocks(samples: tuple[Row, ...]) -> Iterator[Block]:
    rows: list[tuple[Cell, ...]] = []
    for owner, keys in (("rank", OF_RANKS), ("node", OF_NODES)):
        for key, (title, unit) in keys.items():
            found = _lines(samples, key, owner, unit)
            if found and key in CHARTS:
                yield Chart(title, "minutes", tuple(_curves(found)))
            rows += [(title, who, *_extent(line, key, who)) for who, line in found.items()]
    if rows:
        yield Table(("", "", "mean", "highest"), tuple(rows), folded="" if len(rows) <= MOST_ROWS else "The numbers")


def _lines(samples: tuple[Row, ...], key: str, owner: str, unit: float) -> Lines:
    found: Lines = {}
    for row in samples:
        if finite(row.get(key)):
            minutes = (row["time"] - samples[0]["time"]) / 60
            found.setdefault(f"{owner} {row.get(owner)}", []).append((minutes, row[key] / unit))
    return found


def _curves(found: Lines) -> Iterator[Curve]:
    if len(found) <= MOST_CURVES:
        yield from (Curve(who, tuple(line)) for who, line in found.items())
        return
    together = list(zip(*found.values(), strict=False))  # all ranks sample at the same pace
    for name, of in (("lowest", min), ("mean", fmean), ("highest", max)):
        yield Curve(f"{name} of {len(found)}", tuple((at[0][0], of([value for _, value in at])) for at in together))


def _extent(line: list[tuple[float, float]], key: str, who: str) -> Iterator[Number]:
    values = [value for _, value in line]
    for name, value in (("mean", fmean(values)), ("highest", max(values))):
        yield Number(value, f"{value:,.4g}", f"system.jsonl:{name}:{key}:{who}")
