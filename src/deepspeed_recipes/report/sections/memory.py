"""The sections with predicted and measured memory, and with the parts of the model on each rank."""

from collections.abc import Iterator, Mapping
from typing import Any

from ..document import Bars, Block, Cell, Note, Number, Section, Table, number
from ..run_data import RunData

ON_GPU = {"gpu_peak_gib": "allocated at most, rank 0", "gpu_reserved_gib": "reserved at most, rank 0"}
ON_HOST = {"host_peak_gib": "resident at most, rank 0"}
"""Keys of metrics.jsonl and summary.json with their descriptions."""
KINDS = ("parameters", "optimizer")
"""Kinds of tensors that a rank holds of a layer, in bytes."""
MIB = 2**20


def section(run: RunData) -> Section:
    """Return the predicted memory of the fullest GPU by purpose, and the measured memory."""
    return Section("Memory", tuple(_memory(run)))


def _memory(run: RunData) -> Iterator[Block]:
    planned = (run.summary.get("predicted") or {}).get("components_gib") or {}
    parts = tuple(
        (name.replace("_", " "), one)
        for name, size in planned.items()
        if (one := number(size, ".2f", f"summary.json:predicted.components_gib.{name}", " GiB"))
    )
    if not parts:
        yield Note("No prediction: the planner was not used, or this machine has no GPU; only GPU memory is predicted.")
    predicted = (("predicted, by purpose", parts),) if parts else ()
    on_gpu = (*predicted, *_measured(run, ON_GPU))
    if on_gpu:
        yield Bars("The fullest GPU at its fullest moment", on_gpu)
    if on_host := _measured(run, ON_HOST):
        yield Bars("The host", on_host)


def _measured(run: RunData, keys: Mapping[str, str]) -> tuple[tuple[str, tuple[tuple[str, Number], ...]], ...]:
    return tuple((label, ((label, one),)) for key, label in keys.items() if (one := _peak(run, key)))


def _peak(run: RunData, key: str) -> Number | None:
    if key in run.summary:
        return number(run.summary[key], ".2f", f"summary.json:{key}", " GiB")
    return number(run.metrics[-1].get(key), ".2f", f"metrics.jsonl:{len(run.metrics)}:{key}", " GiB")


def rank_section(run: RunData) -> Section:
    """Return the tensors that each rank holds, in total and layer by layer."""
    if not run.ranks:
        return Section("Tensors on each rank", (Note("Not recorded by this run."),))
    bars, rows = [], list[tuple[Cell, ...]]()
    for at, rank in enumerate(run.ranks):
        parts = [(kind, _held(rank, at, kind)) for kind in KINDS]
        label = f"rank {rank.get('rank', at)}"
        bars.append((label, tuple((kind, one) for kind, one in parts if one)))
        rows += _layers(rank, at, label)
    layers = Table(("rank", "layer", *KINDS), tuple(rows), folded="Layer by layer")
    how = Note(
        "Tensors that stay on the rank between steps, on its GPU or on the host, measured after the last step. The "
        "optimizer's part is Adam's moments and the fp32 weights that it updates. Temporary tensors (gradients, "
        "activations, buffers) and tensors on NVMe are not included."
    )
    return Section("Tensors on each rank", (how, Bars("Parameters and optimizer", tuple(bars)), layers))


def _held(rank: Any, at: int, kind: str) -> Number | None:
    total = sum(layer.get(kind, 0) for layer in rank.get("layers", ()))
    return number(total / MIB, ",.2f", f"ranks:{at}:{kind}", " MiB")


def _layers(rank: Any, at: int, label: str) -> Iterator[tuple[Cell, ...]]:
    for index, layer in enumerate(rank.get("layers", ())):
        cells = (number(layer.get(kind), ",d", f"ranks:{at}:layers.{index}.{kind}", " B") for kind in KINDS)
        yield label, str(layer.get("name")), *cells
