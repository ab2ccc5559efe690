"""Published throughput tables as what `time.step` takes: what was trained, how, on what, and how fast it was."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from recipes.planning.anatomy import Anatomy, Kind
from recipes.planning.constants import MEASUREMENTS
from recipes.planning.hardware import Cluster, find
from recipes.planning.setup import Setup
from recipes.spec.recipe import Layout, Lora


@dataclass(frozen=True)
class Run:
    """One row of a table."""

    table: str
    """And the part of it."""
    fitted: bool
    """Whether the constants were fitted on it; all others are there to judge them by."""
    software: str
    """A key of `constants.json`."""
    anatomy: Anatomy
    setup: Setup
    cluster: Cluster
    tokens_per_second_per_gpu: float


def runs() -> list[Run]:
    """Return every row of every table, and this project's own measurements.

    Which rows the constants are fitted on was decided before the first fit, by whole parts of tables: the A100 40GB
    and the smaller H100 runs of llm-foundry, and the first four days of BigScience, when only tensor 8 was tried. How
    well the others are predicted was looked at some seven times while `time.py` got its terms.
    """
    return [*_llm_foundry(), *_bigscience(), *_ours()]


def gpt(hidden: int, layers: int, heads: int, vocabulary: int, ends: bool = True) -> Anatomy:
    """Return a decoder of GPT's shape with tied embeddings, as both tables' models are.

    Args:
        hidden: its width; the feed-forward layer is four times as wide.
        layers: how many.
        heads: of attention, queries, keys and values alike.
        vocabulary: entries.
        ends: count the embedding's parameters where layers are spread over pipeline stages.
    """
    linears = ((hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden))
    split = 12 * hidden**2
    kind = Kind(split + 13 * hidden, split, 0, linears, split, hidden, None)
    embedding = vocabulary * hidden if ends else 0
    return Anatomy(
        "gpt", hidden, vocabulary, heads, heads, (kind,), (0,) * layers, embedding, 2 * hidden * ends, tied=True
    )


def _rows(table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for row in table["rows"]:
        yield dict(zip(table["columns"], row, strict=True))


def _read(name: str) -> dict[str, Any]:
    return json.loads((MEASUREMENTS / name).read_text())


def _llm_foundry() -> Iterator[Run]:
    table = _read("llm_foundry.json")
    network = {"A100": 200.0, "H100": 400.0}  # GB/s of a node
    for row in _rows(table):
        part, gpus = row["part"], row["gpus"]
        gpu = find(part.split(",")[0])
        setup = Setup(
            gpus,
            stage=row["stage"],
            micro_batch_size=row["micro_batch_size"],
            accumulation=row["accumulation"],
            sequence_length=row["sequence_length"],
            gradient_checkpointing=row["checkpointing"],
        )
        yield Run(
            f"llm-foundry, {part}",
            part in ("A100 40GB", "H100, up to 64 GPUs"),
            "llm-foundry",
            gpt(**table["models"][row["model"]], vocabulary=table["vocabulary"]),
            setup,
            Cluster(gpu, min(gpus, 8), max(1, gpus // 8), network_gbs=network[gpu.name.split()[0]]),
            row["tokens_per_second_per_gpu"],
        )


def _bigscience() -> Iterator[Run]:
    table = _read("bigscience_176b.json")
    for row in _rows(table):
        gpus, tensor, pipeline = row["gpus"], row["tensor"], row["pipeline"]
        rows = gpus // (tensor * pipeline) * row["micro_batch_size"]
        setup = Setup(
            gpus,
            Layout(tensor, pipeline),
            stage=1,
            micro_batch_size=row["micro_batch_size"],
            accumulation=row["global_batch_size"] // rows,
            sequence_length=table["sequence_length"],
            attention="eager",
        )
        anatomy = gpt(row["hidden"], row["layers"], row["heads"], table["vocabulary"], row["embedding_is_a_layer"])
        first = row["date"] <= "2022-02-23"
        yield Run(
            f"BigScience, {'until' if first else 'after'} 2022-02-23",
            first,
            "megatron-deepspeed",
            anatomy,
            setup,
            Cluster(find("A100 80GB"), 8, gpus // 8, network_gbs=50.0),
            setup.tokens_per_step / row["seconds"] / gpus,
        )


def _ours() -> Iterator[Run]:
    """Return what this project measured: `speed_*.json`, one run each.

    Such a file has `gpu`, `gpus_per_node`, `nodes`, `tokens_per_second_per_gpu`, and an `Anatomy` and a `Setup` as
    `dataclasses.asdict` gives them; whatever else it has is for people.
    """
    for file in sorted(MEASUREMENTS.glob("speed_*.json")):
        found = json.loads(file.read_text())
        kinds = [
            Kind(**{**kind, "saved": {}, "linears": tuple(map(tuple, kind["linears"]))})
            for kind in found["anatomy"]["kinds"]
        ]
        anatomy = Anatomy(**{**found["anatomy"], "kinds": tuple(kinds), "order": tuple(found["anatomy"]["order"])})
        lora = found["setup"]["lora"]
        changed = {"layout": Layout(**found["setup"]["layout"]), "lora": Lora(**lora) if lora else None}
        yield Run(
            "ours",
            True,
            "deepspeed",
            anatomy,
            Setup(**{**found["setup"], **changed}),
            Cluster(find(found["gpu"]), found["gpus_per_node"], found["nodes"]),
            found["tokens_per_second_per_gpu"],
        )
