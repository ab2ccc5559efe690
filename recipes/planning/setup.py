"""One way to train a model: everything that memory and time depend on, apart from the model and the hardware."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from recipes.spec import logits
from recipes.spec.layout import data_parallel_size, gradient_accumulation_steps
from recipes.spec.recipe import Layout, Lora, Precision, Recipe

Device = Literal["none", "cpu", "nvme"]


@dataclass(frozen=True)
class Setup:
    """A recipe and its DeepSpeed file on so many ranks, in numbers."""

    world_size: int
    """Ranks over all nodes, one per GPU."""
    layout: Layout = field(default_factory=Layout)
    stage: int = 3
    """Of ZeRO."""
    micro_batch_size: int = 1
    """Rows per forward pass and data-parallel rank."""
    accumulation: int = 1
    """Forward passes per optimizer step; a pipeline's micro-batches."""
    sequence_length: int = 2048
    """Tokens of a row."""
    precision: Precision = "bf16"
    gradient_checkpointing: bool = True
    packing: bool = True
    preferences: bool = False
    """DPO: each example is two rows; without adapters a second model is held, frozen, to compare with."""
    attention: str = "sdpa"
    """As `Model.attention`: `eager` keeps every score."""
    lora: Lora | None = None
    """None: all weights are trained."""
    quantized: bool = False
    """The frozen linear layers are held in 4 bits."""
    tiled_loss: bool | None = False
    """The loss is computed in pieces, so that the logits never exist at once; None: where they would be large."""
    tiled_mlp: bool = False
    """So are the feed-forward layers."""
    offload_optimizer: Device = "none"
    offload_parameters: Device = "none"
    """Stage 3 only."""
    partition_size: int = 1
    """`zero_hpz_partition_size`: ranks that hold a second copy of the parameters between them (stage 3)."""
    bf16_states: bool = False
    """Master weights and Adam's moments in bf16 rather than fp32."""
    fp32_accumulation: bool = False
    """`data_types.grad_accum_dtype`: gradients are added up in fp32."""
    overlap_comm: bool = True
    reduce_bucket_size: int | None = None
    """Elements; None: what the Trainer fills in for `auto`, the hidden size squared."""
    prefetch_bucket_size: int | None = None
    """Elements, stage 3; None: 0.9 of the hidden size squared."""
    persistence_threshold: int | None = None
    """Elements; parameters below it are never sharded (stage 3). None: ten times the hidden size."""
    max_live_parameters: int = 10**9
    max_reuse_distance: int = 10**9
    """Parameters; what is used again within so many is kept whole (stage 3)."""
    sub_group_size: int = 10**9

    @property
    def rows(self) -> int:
        """Ranks that read different rows."""
        return data_parallel_size(self.layout, self.world_size)

    @property
    def zero_ranks(self) -> int:
        """Ranks that ZeRO shards over: those that hold the same weights."""
        return self.rows * self.layout.sequence

    @property
    def forward_rows(self) -> int:
        """Rows that go through the model at once."""
        return self.micro_batch_size * (2 if self.preferences else 1)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step over the whole world, padding included."""
        return self.rows * self.forward_rows * self.accumulation * self.sequence_length

    def tiles(self, vocabulary: int) -> bool:
        """Return whether the loss is computed in tiles."""
        tokens = self.micro_batch_size * self.sequence_length / self.layout.sequence
        return logits.are_large(tokens, vocabulary) if self.tiled_loss is None else self.tiled_loss

    @property
    def copy_size(self) -> int:
        """Ranks that share one copy of the model's computation."""
        return math.prod((self.layout.tensor, self.layout.pipeline, self.layout.sequence))


def setup_of(recipe: Recipe, config: Mapping[str, Any], world_size: int) -> Setup:
    """Return a recipe and its DeepSpeed file on so many ranks, in numbers.

    Args:
        recipe: of which model, method, batch and layout count.
        config: the DeepSpeed JSON, with or without `auto`.
        world_size: ranks over all nodes.

    Raises:
        UserError: the global batch cannot be shared out among the ranks.
    """
    zero, bf16 = config.get("zero_optimization", {}), config.get("bf16", {})
    stage = int(zero.get("stage", 0))
    return Setup(
        world_size=world_size,
        layout=recipe.layout,
        stage=stage,
        micro_batch_size=recipe.micro_batch_size,
        accumulation=gradient_accumulation_steps(recipe, world_size),
        sequence_length=recipe.sequence_length,
        precision=recipe.precision,
        # `selective` keeps less than none and more than all of it does: counted as none.
        gradient_checkpointing=recipe.gradient_checkpointing is True,
        packing=recipe.packing and recipe.method != "dpo",
        preferences=recipe.method == "dpo",
        attention=recipe.model.attention,
        tiled_loss=logits.asked_for(recipe),
        tiled_mlp=recipe.tiled_mlp,
        lora=recipe.lora,
        quantized=recipe.model.quantization != "none",
        offload_optimizer=_device(zero, "offload_optimizer") if stage >= 2 else "none",
        offload_parameters=_device(zero, "offload_param") if stage == 3 else "none",
        partition_size=int(zero.get("zero_hpz_partition_size", 1)) if stage == 3 else 1,
        bf16_states=bool(bf16.get("bf16_master_weights_and_grads") and bf16.get("bf16_optimizer_states")),
        fp32_accumulation=config.get("data_types", {}).get("grad_accum_dtype") in ("fp32", "float32"),
        overlap_comm=bool(zero.get("overlap_comm", stage == 3)),
        reduce_bucket_size=_elements(zero, "reduce_bucket_size", 5 * 10**8),
        prefetch_bucket_size=_elements(zero, "stage3_prefetch_bucket_size", 5 * 10**7),
        persistence_threshold=_elements(zero, "stage3_param_persistence_threshold", 10**5),
        max_live_parameters=_elements(zero, "stage3_max_live_parameters", 10**9) or 10**9,
        max_reuse_distance=_elements(zero, "stage3_max_reuse_distance", 10**9) or 10**9,
        sub_group_size=_elements(zero, "sub_group_size", 10**9) or 10**9,
    )


def _device(zero: Mapping[str, Any], key: str) -> Device:
    return (zero.get(key) or {}).get("device", "none")


def _elements(zero: Mapping[str, Any], key: str, default: int) -> int | None:
    """Return a size, DeepSpeed's default where there is none, and None for what the Trainer fills in (`auto`)."""
    value = zero.get(key, default)
    return None if value == "auto" else int(value)
