"""Published throughput tables as what `time.step` takes: what was trained, how, on what, and how fast it was."""

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from recipes.planning.anatomy import Anatomy, Kind
from recipes.planning.constants import MEASUREMENTS
from recipes.planning.hardware import Cluster, find
from recipes.planning.setup import Setup, setup_of
from recipes.planning.trace import anatomy
from recipes.spec import measured
from recipes.spec.recipe import Layout, Recipe, from_dict


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
        ends: count embedding and output matrix where layers are spread over pipeline stages.
    """
    linears = ((hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden))
    split = 12 * hidden**2
    kind = Kind(split + 13 * hidden, split, 0, linears, split, hidden, None)
    embedding = vocabulary * hidden if ends else 0
    return Anatomy(
        "gpt", hidden, vocabulary, heads, heads, (kind,), (0,) * layers, embedding, 2 * hidden * ends, tied=ends
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
        model = gpt(row["hidden"], row["layers"], row["heads"], table["vocabulary"], row["embedding_is_a_layer"])
        first = row["date"] <= "2022-02-23"
        yield Run(
            f"BigScience, {'until' if first else 'after'} 2022-02-23",
            first,
            "megatron-deepspeed",
            model,
            setup,
            Cluster(find("A100 80GB"), 8, gpus // 8, network_gbs=50.0),
            setup.tokens_per_step / row["seconds"] / gpus,
        )


def _ours() -> Iterator[Run]:
    """Return what `scripts/benchmark.py` measured of this project's own training, a case of a benchmark each.

    Left out are peers, and what `time.py` has no terms for: compiled layers, fused kernels, selective checkpointing and
    rows that are padded. Those of `planner_error` are there to judge by.
    """
    for name, result in measured.results(MEASUREMENTS).items():
        for case in result["cases"]:
            runs = [run for run in result["runs"].get(case["label"], []) if "error" not in run]
            recipe = from_dict(runs[0]["recipe"]) if runs else None
            if recipe and case["peer"] == "recipe" and _is_plain(recipe):
                seconds = statistics.median(second for run in runs for second in run["step_seconds"])
                yield Run(
                    f"ours, {name}",
                    not name.startswith("planner_error"),
                    "deepspeed",
                    anatomy(recipe.model.config, recipe.lora),
                    setup_of(recipe, runs[0]["config"], world_size=1),
                    Cluster(find(result["environment"]["gpus"][0])),
                    runs[0]["tokens_per_step"] / seconds,
                )


def _is_plain(recipe: Recipe) -> bool:
    usual = recipe.compile == "off" and not recipe.liger_kernel
    return usual and recipe.packing and recipe.gradient_checkpointing != "selective"
