"""Which parallel layouts are possible, where each rank stands in them, and what they leave for data parallelism."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recipes.spec.errors import UserError
from recipes.spec.recipe import Layout, Recipe


@dataclass(frozen=True)
class Place:
    """Where a rank stands; every number counts from zero."""

    stage: int
    """Of the pipeline."""
    row: int
    """Which share of the global batch's rows it reads."""
    sequence: int
    """Which part of those rows it computes."""
    tensor: int
    """Which part of each matrix it holds."""

    @property
    def counts(self) -> bool:
        """Whether this is the one that counts, of all ranks that read the same rows."""
        return not (self.stage or self.sequence or self.tensor)


def place(layout: Layout, rank: int, world_size: int) -> Place:
    """Return where `rank` stands: tensor parallel ranks side by side, then sequence, rows, and stages furthest apart.

    What communicates most is nearest: tensor parallelism per layer, a pipeline once per stage. It is the order of
    DeepSpeed's own groups too: AutoTP's, and `PipeModelDataParallelTopology` with sequence ranks as its data ranks.
    """
    rank, tensor = divmod(rank, layout.tensor)
    rank, sequence = divmod(rank, layout.sequence)
    stage, row = divmod(rank, data_parallel_size(layout, world_size))
    return Place(stage, row, sequence, tensor)


def data_parallel_size(layout: Layout, world_size: int) -> int:
    """Return how many ranks read different rows. Experts are spread over those ranks, and cost none of them.

    Raises:
        UserError: the layout does not divide the world.
    """
    if world_size % layout.expert:
        raise UserError(
            f"layout.expert={layout.expert}: {world_size} ranks are not a multiple of it; "
            f"use layout.expert={math.gcd(world_size, layout.expert)}."
        )
    return world_size // (layout.tensor * layout.pipeline * layout.sequence)


def gradient_accumulation_steps(recipe: Recipe, world_size: int) -> int:
    """Return the forward passes per rank and optimizer step that make up the global batch.

    Raises:
        UserError: the global batch is not a multiple of what one pass over the world handles.
    """
    per_pass = recipe.micro_batch_size * data_parallel_size(recipe.layout, world_size)
    steps, rest = divmod(recipe.global_batch_size, per_pass)
    if rest or not steps:
        below = max(per_pass, recipe.global_batch_size // per_pass * per_pass)
        raise UserError(
            f"global_batch_size={recipe.global_batch_size} is not a multiple of micro_batch_size x data-parallel ranks "
            f"= {per_pass}; the nearest that are: {below}, {below + per_pass}."
        )
    return steps


TENSOR_MODEL_TYPES = (
    "gemma3_text",
    "glm4",
    "gpt_neox",
    "granite",
    "llama",
    "mistral",
    "olmo3",
    "phi3",
    "qwen3",
    "qwen3_5_text",
    "smollm3",
)
"""Whose layers are split rightly; `tests/test_tensor.py` holds it against every family of the catalogue."""


def tensor_limits(recipe: Recipe, config: Mapping[str, Any]) -> None:
    """Refuse tensor parallelism where the model cannot be split, or would be split wrongly.

    Args:
        recipe: what to train, and how.
        config: the model's, as its `config.json` has it; empty where nobody knows it yet.

    Raises:
        UserError: the architecture, its heads, adapters or the method.
    """
    size = recipe.layout.tensor
    config = config.get("text_config", config)
    if size == 1:
        return
    if recipe.method == "dpo":
        raise UserError(f"layout.tensor={size}: TRL's DPO reads the output head whole; use layout.tensor=1 and ZeRO-3.")
    if recipe.model.quantization != "none" or (recipe.lora and recipe.lora.dora):
        what = "lora.dora=true" if recipe.model.quantization == "none" else "model.quantization=nf4"
        raise UserError(f"layout.tensor={size}: {what} needs whole weights; use layout.tensor=1 and ZeRO-3.")
    if not config:
        return
    kind = config["model_type"]
    if kind not in TENSOR_MODEL_TYPES:
        raise UserError(
            f"layout.tensor={size}: {kind} cannot be split; use ZeRO-3, or layout.expert for a mixture of experts.\n"
            f"What can: {', '.join(TENSOR_MODEL_TYPES)}."
        )
    heads = config["num_attention_heads"]
    shared = config.get("num_key_value_heads") or heads
    if math.gcd(heads, shared) % size:
        nearest = max(n for n in range(1, size) if math.gcd(heads, shared) % n == 0)
        raise UserError(
            f"layout.tensor={size}: {heads} attention heads and {shared} key/value heads are not multiples of it; "
            f"use layout.tensor={nearest}."
        )
