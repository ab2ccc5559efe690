"""How a model is trained, in numbers: what memory and time depend on besides the model and the hardware."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...recipe import loss_tiles
from ...recipe.deepspeed_file import KEPT_WEIGHTS, DeepSpeedFile, Device, prefetch_size
from ...recipe.layout import data_parallel_size, gradient_accumulation_steps
from ...recipe.optimization.optimizers import Optimizer
from ...recipe.recipe import Checkpointing, Layout, Lora, Precision, Recipe
from ..model_profile import teacher


@dataclass(frozen=True)
class TrainingSetup:
    """A recipe and its DeepSpeed file on so many ranks, in numbers."""

    world_size: int
    """Ranks over all nodes, one per GPU."""
    layout: Layout = field(default_factory=Layout)
    zero_stage: int = 3
    micro_batch_size: int = 1
    """Sequences per forward pass and data-parallel rank; where a method compares answers, pairs."""
    gradient_accumulation_steps: int = 1
    """Forward passes per optimizer step; a pipeline's micro-batches."""
    sequence_length: int = 2048
    """In tokens."""
    precision: Precision = "bf16"
    gradient_checkpointing: Checkpointing = True
    activation_offloading: bool = False
    """What checkpointing keeps of layers is in host memory."""
    packing: bool = True
    document_length: float | None = None
    """Tokens of the document that a token of a packed sequence is in, on average: it attends to no other. None: as many
    as the sequence has."""
    sequences_per_example: int = 1
    """Two where a method compares two answers."""
    reference: bool = False
    """Without adapters a frozen second model is held for comparison."""
    teacher_parameters: int = 0
    """Of a frozen model that is held beside the one that trains, and computes as often."""
    teacher_quantized: bool = False
    """Its weights are in 4 bits, and whole on each rank."""
    scores: bool = False
    """A few outputs per sequence instead of logits, or none."""
    rollout_answers: int = 0
    """Answers that a rank writes at once, where the model learns from its own."""
    rollout_gathers: bool = True
    """ZeRO-3 gathers the whole weights for it."""
    attention: str = "sdpa"
    """As in `Model.attention`; `eager` saves every score."""
    lora: Lora | None = None
    """None: all weights are trained."""
    quantized: bool = False
    """The frozen linear layers are in 4 bits."""
    quantized_experts: bool = False
    """Routed experts are in 4 bits too, as where they are linear layers (transformers before 5); fused ones are not."""
    frozen_fp32: bool = False
    """What is not in 4 bits is in fp32, and so is what flows between layers: PEFT's `prepare_model_for_kbit_training`,
    which this project does without."""
    fsdp: bool = False
    """FSDP shards it and not ZeRO-3: a layer at a time, and 4-bit weights while they load, not after."""
    tiled_loss: bool | None = False
    """The loss is computed in tiles, so that whole logits never exist; None: where they would be large."""
    tensor_splits_all: bool = False
    """Tensor-parallel ranks divide all activations and the logits, as in Megatron (arXiv:2205.05198) and in torchtitan;
    DeepSpeed's AutoTP divides what is inside a layer's matrices only."""
    logit_bytes: float | None = None
    """Per token and vocabulary entry, of whole logits without a cap in other software than this; None: as profiled."""
    tiled_mlp: bool = False
    """The feed-forward layers are computed in tiles."""
    fp32_adapters: bool = False
    """Adapters are in fp32 next to a model in bf16: PEFT's default, which this project changes."""
    fp32_activations: bool = False
    """What lies between 4-bit matrices is, too, after PEFT's `prepare_model_for_kbit_training`; not in this project."""
    liger_kernel: bool = False
    """Norms, rotary embedding and activation functions are one kernel each."""
    compile: bool = False
    """Element-wise operations are fused by torch.compile."""
    grouped_experts: bool = True
    """All experts of a layer in one product, as transformers from 5 on computes them; False: one after the other."""
    optimizer: Optimizer = "adamw"
    foreach_adam: bool = False
    """Adam on the GPU is not one kernel but an operation after the other, as torch has it without `fused`; not here."""
    offload_optimizer: Device = "none"
    offload_parameters: Device = "none"
    """Stage 3 only."""
    partition_size: int = 1
    """`zero_hpz_partition_size`: ranks that share a second copy of the parameters (stage 3)."""
    bf16_states: bool = False
    """Master weights and Adam's moments are in bf16 rather than fp32."""
    fp32_accumulation: bool = False
    """`data_types.grad_accum_dtype`: gradients are accumulated in fp32."""
    overlap_comm: bool = True
    reduce_bucket_size: int | None = None
    """Elements; None: what the Trainer fills in for `auto`, the hidden size squared."""
    prefetch_bucket_size: int | None = None
    """Elements, stage 3; None: 0.9 of the hidden size squared, or what `gathers_layers` says."""
    gathers_layers: bool = False
    """The launcher fills in `deepspeed_file.prefetch_size` for "auto"."""
    persistence_threshold: int | None = None
    """Elements; parameters below it are never sharded (stage 3). None: ten times the hidden size."""
    kept_weights: int = KEPT_WEIGHTS
    """Elements that are whole at most between the forward and the backward pass (stage 3); 0: FSDP frees each layer."""
    sub_group_size: int = 10**9

    @property
    def recomputes_layers(self) -> bool:
        """Whether whole layers are computed again."""
        return self.gradient_checkpointing is True

    @property
    def selective(self) -> bool:
        """Whether layers are computed again but for their matrix products and attention."""
        return self.gradient_checkpointing == "selective"

    @property
    def recomputes_feed_forward(self) -> bool:
        """Whether feed-forward layers are computed again: what is tiled is checkpointed too (`training.model.load`)."""
        return self.gradient_checkpointing == "feed_forward" or self.tiled_mlp

    @property
    def fuses(self) -> bool:
        """Whether element-wise operations are fused: by Liger's kernels, or by torch.compile."""
        return self.liger_kernel or self.compile

    @property
    def data_parallel_size(self) -> int:
        """Ranks that read different sequences."""
        return data_parallel_size(self.layout, self.world_size)

    @property
    def zero_ranks(self) -> int:
        """Ranks that ZeRO shards over: those that hold the same weights."""
        return self.data_parallel_size * self.layout.sequence

    @property
    def gathers(self) -> bool:
        """Whether ZeRO-3 copies weights to use them: a rank of its own uses its shards themselves, if they are there.

        deepspeed 0.19.8, partition_parameters.py, `NoGatherHandle`.
        """
        return self.zero_stage == 3 and (self.zero_ranks > 1 or self.offload_parameters != "none")

    @property
    def sequences_per_pass(self) -> int:
        """Sequences that go through the model at once."""
        return self.micro_batch_size * self.sequences_per_example

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step over all ranks, padding included."""
        sequences = self.data_parallel_size * self.sequences_per_pass * self.gradient_accumulation_steps
        return sequences * self.sequence_length

    def prefetched(self, hidden: int, layer: float) -> float:
        """Return how many elements ZeRO-3 gathers ahead at once, by the model's width and its layers' weights."""
        if self.prefetch_bucket_size is not None:
            return self.prefetch_bucket_size
        return prefetch_size(hidden, int(layer)) if self.gathers_layers else 0.9 * hidden**2

    def reduced(self, hidden: int) -> int:
        """Return how many gradients are reduced at once, by the model's width."""
        return hidden**2 if self.reduce_bucket_size is None else self.reduce_bucket_size

    def feed_forward_tiles(self, hidden: int) -> int:
        """Return in how many parts feed-forward layers compute a sequence (`training.model.tiling.tiles`)."""
        length = self.sequence_length / self.layout.sequence
        return max(2, math.ceil(length / hidden)) if self.tiled_mlp else 1

    def tiles(self, vocabulary: int) -> bool:
        """Return whether the loss is computed in tiles."""
        tokens = self.micro_batch_size * self.sequence_length / self.layout.sequence
        return loss_tiles.are_large(tokens, vocabulary) if self.tiled_loss is None else self.tiled_loss

    @property
    def weight_bytes(self) -> float:
        """Bytes per parameter in which weights travel, between ranks and from the host."""
        return 0.5 if self.quantized else 2

    @property
    def model_parallel_size(self) -> int:
        """Ranks that share one copy of the model's computation."""
        return math.prod((self.layout.tensor, self.layout.pipeline, self.layout.sequence))


def training_setup(recipe: Recipe, file: DeepSpeedFile, world_size: int) -> TrainingSetup:
    """Return how a recipe and its DeepSpeed file train on so many ranks.

    Args:
        recipe: its model, method, batch and layout matter.
        file: its DeepSpeed file, with or without `auto`.
        world_size: ranks over all nodes.

    Raises:
        UserError: the global batch is not divisible among the ranks.
    """
    zero, bf16, data_types = file.zero, file.content.get("bf16", {}), file.content.get("data_types", {})
    return TrainingSetup(
        world_size=world_size,
        layout=recipe.layout,
        zero_stage=file.stage,
        micro_batch_size=recipe.micro_batch_size,
        gradient_accumulation_steps=gradient_accumulation_steps(recipe, world_size),
        sequence_length=recipe.sequence_length,
        precision=recipe.precision,
        gradient_checkpointing=recipe.gradient_checkpointing,
        activation_offloading=recipe.activation_offloading,
        packing=recipe.packs,
        sequences_per_example=recipe.traits.sequences,
        reference=recipe.asks_reference,
        teacher_parameters=teacher.parameters(recipe),
        teacher_quantized=recipe.distill.teacher_quantization != "none",
        scores=recipe.traits.headless,
        rollout_answers=_answers(recipe, world_size),
        rollout_gathers=recipe.grpo.gather,
        attention=recipe.model.attention,
        tiled_loss=recipe.traits.tiles or loss_tiles.asked_for(recipe),
        tiled_mlp=recipe.tiled_mlp,
        liger_kernel=recipe.liger_kernel,
        compile=recipe.compile != "off",
        lora=recipe.lora,
        quantized=recipe.model.quantization != "none",
        optimizer=recipe.optimizer,
        offload_optimizer=file.offload_optimizer,
        offload_parameters=file.offload_parameters,
        partition_size=file.partition_size,
        bf16_states=bool(bf16.get("bf16_master_weights_and_grads") and bf16.get("bf16_optimizer_states")),
        fp32_accumulation=data_types.get("grad_accum_dtype") in ("fp32", "float32"),
        overlap_comm=bool(zero.get("overlap_comm", file.stage == 3)),
        reduce_bucket_size=_elements(zero, "reduce_bucket_size", 5 * 10**8),
        prefetch_bucket_size=_elements(zero, "stage3_prefetch_bucket_size", 5 * 10**7),
        gathers_layers=True,
        persistence_threshold=_elements(zero, "stage3_param_persistence_threshold", 10**5),
        kept_weights=file.kept_weights,
        sub_group_size=_elements(zero, "sub_group_size", 10**9) or 10**9,
    )


def _answers(recipe: Recipe, world_size: int) -> int:
    """Return how many answers a rank writes at once: its part of a step's, unless a server writes them."""
    by_server = recipe.traits.rollouts and recipe.grpo.vllm is not None
    if by_server or not recipe.writes_answers:
        return 0
    return recipe.micro_batch_size * gradient_accumulation_steps(recipe, world_size)


def _elements(zero: Mapping[str, Any], key: str, default: int) -> int | None:
    """Return a size, DeepSpeed's default where the key is missing, and None for `auto`, which the Trainer fills in."""
    value = zero.get(key, default)
    return None if value == "auto" else int(value)
