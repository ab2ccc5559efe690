"""One way to train a model: everything that memory and time depend on, apart from the model and the hardware."""

import math
from dataclasses import dataclass, field
from typing import Literal

from recipes.spec.layout import data_parallel_size
from recipes.spec.recipe import Layout, Lora, Precision

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
    attention: str = "sdpa"
    """As `Model.attention`: `eager` keeps every score."""
    lora: Lora | None = None
    """None: all weights are trained."""
    quantized: bool = False
    """The frozen linear layers are held in 4 bits."""
    tiled_loss: bool = False
    """The loss is computed in pieces, so that the logits never exist at once."""
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
    def tokens_per_step(self) -> int:
        """Tokens of a step over the whole world, padding included."""
        return self.rows * self.micro_batch_size * self.accumulation * self.sequence_length

    @property
    def copy_size(self) -> int:
        """Ranks that share one copy of the model's computation."""
        return math.prod((self.layout.tensor, self.layout.pipeline, self.layout.sequence))
