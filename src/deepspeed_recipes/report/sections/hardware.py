"""The sections with memory, tensors on each rank, the use of GPUs and nodes, and the recorded steps of `--profile`."""

from collections.abc import Iterator
from statistics import fmean

from ..page import Bars, Block, Cell, Chart, Curve, Note, Number, Parts, Section, Table, number
from ..profiler.verdict import NAMES, SUMMED, pipeline, slower, span
from ..run_data import PROFILE, RunData
from .curves import finite

MEASURED = {
    "The fullest GPU at its fullest moment": {
        "gpu_peak_gib": "allocated at most, rank 0",
        "gpu_reserved_gib": "reserved at most, rank 0",
    },
    "The host": {"host_peak_gib": "resident at most, rank 0"},
}
"""Keys of metrics.jsonl and summary.json with their descriptions, by chart."""
KINDS = ("parameters", "optimizer")
"""Kinds of tensors that a rank holds of a layer, in bytes."""
MIB = 2**20


def memory(run: RunData) -> Section:
    """Return the predicted memory of the fullest GPU by purpose, and the measured memory."""
    planned = (run.summary.get("predicted") or {}).get("components_gib") or {}
    parts = tuple(
        (name.replace("_", " "), one)
        for name, size in planned.items()
        if (one := number(size, ".2f", f"summary.json:predicted.components_gib.{name}", " GiB"))
    )
    none = "No prediction: the planner was not used, or this machine has no GPU; only GPU memory is predicted."
    blocks: list[Block] = [] if parts else [Note(none)]
    predicted: list[tuple[str, Parts]] = [("predicted, by purpose", parts)] if parts else []
    for title, keys in MEASURED.items():
        peaks = (
            (label, run.number(f"summary.json:{key}", ".2f", " GiB") or run.last(key, ".2f", " GiB"))
            for key, label in keys.items()
        )
        bars = [*predicted, *((label, ((label, one),)) for label, one in peaks if one)]
        blocks += [Bars(title, tuple(bars))] if bars else []
        predicted = []
    return Section("Memory", tuple(blocks))


def tensors(run: RunData) -> Section:
    """Return the tensors that each rank holds, in total and layer by layer."""
    if not run.ranks:
        return Section("Tensors on each rank", (Note("Not recorded by this run."),))
    bars, rows = list[tuple[str, Parts]](), list[tuple[Cell, ...]]()
    for at, rank in enumerate(run.ranks):
        label, layers = f"rank {rank.get('rank', at)}", rank.get("layers", ())
        totals = {kind: sum(layer.get(kind, 0) for layer in layers) / MIB for kind in KINDS}
        parts = ((kind, number(total, ",.2f", f"ranks:{at}:{kind}", " MiB")) for kind, total in totals.items())
        bars.append((label, tuple((kind, one) for kind, one in parts if one)))
        for index, layer in enumerate(layers):
            sizes = (number(layer.get(kind), ",d", f"ranks:{at}:layers.{index}.{kind}", " B") for kind in KINDS)
            rows.append((label, str(layer.get("name")), *sizes))
    how = Note(
        "Tensors that stay on the rank between steps, on its GPU or on the host, measured after the last step. The "
        "optimizer's part is Adam's moments and the fp32 weights that it updates. Temporary tensors (gradients, "
        "activations, buffers) and tensors on NVMe are not included."
    )
    layer_by_layer = Table(("rank", "layer", *KINDS), tuple(rows), folded="Layer by layer")
    return Section("Tensors on each rank", (how, Bars("Parameters and optimizer", tuple(bars)), layer_by_layer))


GIGA = 1e9
SAMPLED = {
    "rank": {
        "gpu_utilization": ("GPU busy (%)", 1),
        "gpu_memory_utilization": ("GPU memory read or written (% of the time)", 1),
        "gpu_memory_gib": ("GPU memory in use, all processes (GiB)", 1),
        "gpu_power_watts": ("GPU power (W)", 1),
        "gpu_temperature_celsius": ("GPU temperature (degrees Celsius)", 1),
        "pcie_received_bytes_per_second": ("PCIe, received (GB/s)", GIGA),
        "pcie_sent_bytes_per_second": ("PCIe, sent (GB/s)", GIGA),
        "nvlink_received_bytes_per_second": ("NVLink, received (GB/s)", GIGA),
        "nvlink_sent_bytes_per_second": ("NVLink, sent (GB/s)", GIGA),
    },
    "node": {
        "cpu_utilization": ("Host CPU busy (%)", 1),
        "host_memory_gib": ("Host memory in use (GiB)", 1),
        "host_memory_percent": ("Host memory in use (%)", 1),
        "disk_read_bytes_per_second": ("Disks, read (GB/s)", GIGA),
        "disk_written_bytes_per_second": ("Disks, written (GB/s)", GIGA),
        "network_received_bytes_per_second": ("Network, received (GB/s)", GIGA),
        "network_sent_bytes_per_second": ("Network, sent (GB/s)", GIGA),
    },
}
"""Keys of a sample in system.jsonl, each with its title and divisor, by what it is a reading of."""
MOST_CURVES = 6
"""Maximum number of curves in a chart; with more ranks it shows the lowest, the mean and the highest value."""
CHARTS = ("gpu_utilization", "gpu_memory_gib", "gpu_power_watts", "gpu_temperature_celsius", "cpu_utilization")
"""Keys that are drawn over time; the table contains all keys."""
MOST_ROWS = 40
"""Maximum number of rows of an unfolded table."""


def in_use(run: RunData) -> Iterator[Section]:
    """Yield the section with the use of GPUs and nodes, if the run took samples."""
    rows: list[tuple[Cell, ...]] = []
    blocks: list[Block] = []
    for owner, keys in SAMPLED.items():
        for key, (title, unit) in keys.items():
            found: dict[str, list[tuple[float, float]]] = {}  # (minutes, value) pairs by rank or node
            for row in run.system:
                if finite(row.get(key)):
                    minutes = (row["time"] - run.system[0]["time"]) / 60
                    found.setdefault(f"{owner} {row.get(owner)}", []).append((minutes, row[key] / unit))
            if found and key in CHARTS:
                lines = found
                if len(found) > MOST_CURVES:
                    together = list(zip(*found.values(), strict=False))  # all ranks sample at the same pace
                    lines = {
                        f"{name} of {len(found)}": [(at[0][0], of([value for _, value in at])) for at in together]
                        for name, of in (("lowest", min), ("mean", fmean), ("highest", max))
                    }
                curves = tuple(Curve(who, tuple(line)) for who, line in lines.items())
                drawn = Chart(title, "minutes", curves).block()
                blocks += [drawn] if isinstance(drawn, Chart) else []  # the table has the rest
            for who, line in found.items():
                values = [value for _, value in line]
                extent = {"mean": fmean(values), "highest": max(values)}
                cells = (Number(one, f"{one:,.4g}", f"system.jsonl:{of}:{key}:{who}") for of, one in extent.items())
                rows.append((title, who, *cells))
    if rows:
        folded = "" if len(rows) <= MOST_ROWS else "The numbers"
        blocks.append(Table(("", "", "mean", "highest"), tuple(rows), folded=folded))
        yield Section("Hardware in use", tuple(blocks))


OPERATORS = {"calls": (",.0f", "calls per step"), "seconds": (".3g", "seconds per step")}
TRAFFIC = {
    "count": (",.0f", "per step"),
    "bytes": (",.0f", "bytes per step"),
    "predicted_bytes": (",.0f", "by the planner"),
    "seconds": (".3g", "seconds"),
    "waited": (".3g", "waited for"),
    "bytes_per_second": (",.0f", "bytes per second"),
}
"""Numbers of an operator and of a collective, with their formats and their columns."""


def recorded_steps(run: RunData) -> Section:
    """Return the verdict in words, a bar per rank, the most expensive operators, and the communication."""
    found = run.profile
    verdict = (
        f"{span(found).capitalize()}, {found['step_seconds']:.3g} s each{slower(found)}: {found['words']}. "
        f"What to change: {found['change']}."
    )
    bars, hidden = [], []
    for at, rank in enumerate(found["ranks"]):
        shares = {kind: run.number(f"{PROFILE}:ranks.{at}.shares.{kind}", ".1%") for kind in NAMES}
        name = f"rank {rank['rank']}"
        bars.append((name, tuple((NAMES[kind], one) for kind in SUMMED if (one := shares[kind]))))
        hidden.append((name, shares["communication_hidden"]))
    operators, traffic = list[tuple[Cell, ...]](), list[tuple[Cell, ...]]()
    for at, one in enumerate(found["ranks"][0]["operators"]):
        place = f"{PROFILE}:ranks.0.operators.{at}"
        cells = (run.number(f"{place}.{key}", form) for key, (form, _) in OPERATORS.items())
        operators.append((one["name"], one["module"] or None, *cells))
    for at, one in enumerate(found["traffic"]):
        cells = (run.number(f"{PROFILE}:traffic.{at}.{key}", form) for key, (form, _) in TRAFFIC.items())
        traffic.append((one["kind"], ", ".join(map(str, one["ranks"])) or None, *cells))
    blocks = (
        Note(verdict),
        Bars("Shares of a step", tuple(bars)),
        Table(("", "communication hidden by computation"), tuple(hidden)),
        Table(("operator", "module", *(title for _, title in OPERATORS.values())), tuple(operators)),
        Table(("communication", "ranks", *(title for _, title in TRAFFIC.values())), tuple(traffic)),
        *((Note(f"{pipeline(found).capitalize()}."),) if found.get("pipeline") else ()),
    )
    return Section("Profile", blocks)
