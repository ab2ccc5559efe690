"""Reads measured runs from published tables and the project's own benchmarks: setup, hardware and speed."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deepspeed_recipes.planning.cost.training_setup import TrainingSetup, training_setup
from deepspeed_recipes.planning.hardware.cluster import Cluster
from deepspeed_recipes.planning.hardware.gpus import find
from deepspeed_recipes.planning.model_profile.lookup import profile_of
from deepspeed_recipes.planning.model_profile.profile import LayerProfile, ModelProfile
from deepspeed_recipes.recipe import deepspeed_file
from deepspeed_recipes.recipe.conversions import from_dict
from deepspeed_recipes.recipe.recipe import Layout

from .. import gpu_results
from . import MEASUREMENTS


@dataclass(frozen=True)
class MeasuredRun:
    """One row of a table, with the arguments of `cost.step_time`."""

    table: str
    """Name of the table and of its part."""
    fitted: bool
    """True if the constants are fitted on this row; all other rows are held out."""
    software: str
    """`deepspeed` for this project's, otherwise a key of `other_software.json`."""
    profile: ModelProfile
    setup: TrainingSetup
    cluster: Cluster
    tokens_per_second_per_gpu: float


def runs() -> list[MeasuredRun]:
    """Return every row of every table, and the project's own measurements.

    The rows to fit on were chosen before the first fit, as whole parts of tables: the A100 40GB and the smaller H100
    runs of llm-foundry, and the first four days of BigScience, when only tensor 8 was tried. The error on the held-out
    rows was inspected about seven times while the terms of `cost.step_time` were chosen.
    """
    return [*_llm_foundry(), *_bigscience(), *_own_runs()]


def gpt_profile(hidden: int, layers: int, heads: int, vocabulary: int, ends: bool = True) -> ModelProfile:
    """Return the profile of a decoder of GPT's shape with tied embeddings, like the models of both tables.

    Args:
        hidden: hidden size; the feed-forward layer is four times as wide.
        layers: number of layers.
        heads: number of attention heads, the same for queries, keys and values.
        vocabulary: number of entries.
        ends: whether the embedding and the output matrix count when layers are distributed over pipeline stages.
    """
    linears = ((hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden))
    split = 12 * hidden**2
    kind = LayerProfile(split + 13 * hidden, split, 0, linears, split, hidden, None, modules=6)
    embedding = vocabulary * hidden if ends else 0
    order = (0,) * layers
    return ModelProfile("gpt", hidden, vocabulary, heads, heads, (kind,), order, embedding, 2 * hidden * ends, ends)


def _rows(table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for row in table["rows"]:
        yield dict(zip(table["columns"], row, strict=True))


def _read(name: str) -> dict[str, Any]:
    return json.loads((MEASUREMENTS / name).read_text())


def _llm_foundry() -> Iterator[MeasuredRun]:
    table = _read("llm_foundry.json")
    network = {"A100": 200.0, "H100": 400.0}  # GB/s of a node
    for row in _rows(table):
        part, gpus = row["part"], row["gpus"]
        gpu = find(part.split(",")[0])
        setup = TrainingSetup(
            gpus,
            zero_stage=row["stage"],
            micro_batch_size=row["micro_batch_size"],
            gradient_accumulation_steps=row["accumulation"],
            sequence_length=row["sequence_length"],
            gradient_checkpointing=row["checkpointing"],
            packing=False,  # without a mask of documents
        )
        yield MeasuredRun(
            f"llm-foundry, {part}",
            part in ("A100 40GB", "H100, up to 64 GPUs"),
            "llm-foundry",
            gpt_profile(**table["models"][row["model"]], vocabulary=table["vocabulary"]),
            setup,
            Cluster(gpu, min(gpus, 8), max(1, gpus // 8), network_gbs=network[gpu.name.split()[0]]),
            row["tokens_per_second_per_gpu"],
        )


def _bigscience() -> Iterator[MeasuredRun]:
    table = _read("bigscience_176b.json")
    for row in _rows(table):
        gpus, tensor, pipeline = row["gpus"], row["tensor"], row["pipeline"]
        sequences = gpus // (tensor * pipeline) * row["micro_batch_size"]
        setup = TrainingSetup(
            gpus,
            Layout(tensor, pipeline),
            zero_stage=1,
            micro_batch_size=row["micro_batch_size"],
            gradient_accumulation_steps=row["global_batch_size"] // sequences,
            sequence_length=table["sequence_length"],
            attention="eager",
        )
        model = gpt_profile(
            row["hidden"], row["layers"], row["heads"], table["vocabulary"], row["embedding_is_a_layer"]
        )
        first = row["date"] <= "2022-02-23"
        yield MeasuredRun(
            f"BigScience, {'until' if first else 'after'} 2022-02-23",
            first,
            "megatron-deepspeed",
            model,
            setup,
            Cluster(find("A100 80GB"), 8, gpus // 8, network_gbs=50.0),
            setup.tokens_per_step / row["seconds"] / gpus,
        )


def _own_runs() -> Iterator[MeasuredRun]:
    """Yield the project's own training runs measured by `scripts/benchmark.py`, one per case of a benchmark.

    Other trainers are omitted, and so are runs for which `cost.step_time` has no terms: compiled layers, fused
    kernels and adapters, selective checkpointing and padded sequences. Cases of `planner_error` are held out.
    """
    for name, result in gpu_results.results(MEASUREMENTS).items():
        for case in result["cases"]:
            runs = gpu_results.completed_runs(result, case["label"])
            recipe = from_dict(runs[0]["recipe"]) if runs else None
            if recipe is None or case["peer"] != "recipe":
                continue
            fused = recipe.compile != "off" or recipe.liger_kernel or (recipe.lora is not None and recipe.lora.fused)
            if fused or not recipe.packing or recipe.gradient_checkpointing == "selective":
                continue
            yield MeasuredRun(
                f"ours, {name}",
                not name.startswith("planner_error"),
                "deepspeed",
                profile_of(recipe.model.config, recipe.lora),
                training_setup(recipe, deepspeed_file.parse(runs[0]["config"]), world_size=1),
                Cluster(find(result["environment"]["gpus"][0])),
                gpu_results.tokens_per_second(runs),
            )
