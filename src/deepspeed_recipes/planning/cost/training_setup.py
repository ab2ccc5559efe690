"""The settings of a training run that memory and time depend on, in addition to the model and the hardware."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ...recipe import limits
from ...recipe.deepspeed_file import KEPT_WEIGHTS, DeepSpeedFile, Device, prefetch_size
from ...recipe.files import JsonView
from ...recipe.layout import data_parallel_size, gradient_accumulation_steps
from ...recipe.methods import Distill, Grpo
from ...recipe.recipe import Checkpointing, Layout, Lora, Precision, Recipe
from ...recipe.sections import Optimizer
from .. import TABLES
from ..model_profile import counts


@dataclass(frozen=True)
class Software:
    """Differences from this project, whose software has the defaults."""

    logit_bytes: float | None = None
    """Bytes per token and vocabulary entry of whole, uncapped logits. None uses the profile."""
    frozen_fp32: bool = False
    """PEFT's `prepare_model_for_kbit_training`: weights outside 4 bits, and activations between layers, are in fp32."""
    fp32_activations: bool = False
    """The same without autocast: activations between 4-bit matrices are in fp32, too."""
    fp32_adapters: bool = False
    """Adapters are in fp32 next to a model in bf16: PEFT's default."""
    foreach_adam: bool = False
    """Adam on the GPU is a series of operations, as in torch without `fused`."""
    grouped_experts: bool = True
    """A layer's experts are one tensor and one product, as in transformers 5; otherwise linear layers, one by one."""


OWN = Software()
KNOWN: Mapping[str, Software] = {name: Software(**own) for name, own in TABLES["software"].items()}
"""By the name in `plan.py software=NAME`."""


@dataclass(frozen=True)
class TrainingSetup:
    """The settings of a recipe and its DeepSpeed file for a given number of ranks; equal names mean the same."""

    world_size: int
    """Ranks over all nodes, one per GPU."""
    layout: Layout = field(default_factory=Layout)
    zero_stage: int = 3
    micro_batch_size: int = 1
    """Sequences, or pairs of answers for methods that compare answers, per forward pass and data-parallel rank."""
    gradient_accumulation_steps: int = 1
    sequence_length: int = 2048
    precision: Precision = "bf16"
    gradient_checkpointing: Checkpointing = True
    activation_offloading: bool = False
    packing: bool = True
    document_length: float | None = None
    """Tokens of the packed document to which a token attends, averaged over tokens, or None for the whole sequence."""
    sequences_per_example: int = 1
    """2 for methods that compare two answers."""
    reference: bool = False
    """A second, frozen model is held for comparison; with adapters none is needed."""
    teacher_parameters: int = 0
    """Parameters of a frozen teacher, which computes as often as the trained model."""
    teacher_quantized: bool = False
    """The teacher's weights are in 4 bits, and whole on each rank."""
    scores: bool = False
    """The model has a few outputs per sequence, or none, instead of logits."""
    rollout_answers: int = 0
    """Answers that a rank generates at once, for methods that learn from the model's own answers."""
    rollout_gathers: bool = True
    """ZeRO-3 gathers the whole weights to generate answers."""
    answer_length: int | None = None
    """Longest answer in tokens, if the loss reads the answers' logits alone, or None."""
    attention: str = "sdpa"
    lora: Lora | None = None
    trained_share: float = 1.0
    """Share of the parameters that is trained, without adapters. The rest has neither gradients nor states."""
    saved_parameters: int = 0
    """Parameters of modules that are trained whole, together with adapters."""
    further_token: bool = False
    """A head for a further token computes logits and a loss as well."""
    quantized: bool = False
    tiled_loss: bool | None = False
    """The loss is computed in tiles; whole logits never exist. None tiles only if the logits would be large."""
    tiled_mlp: bool = False
    liger_kernel: bool = False
    compile: bool = False
    optimizer: Optimizer = "adamw"
    offload_optimizer: Device = "none"
    offload_parameters: Device = "none"
    partition_size: int = 1
    """`zero_hpz_partition_size`: number of ranks that share a second copy of the parameters (stage 3)."""
    bf16_states: bool = False
    """Master weights and Adam's moments are in bf16 rather than fp32."""
    fp32_accumulation: bool = False
    """`data_types.grad_accum_dtype`: gradients are accumulated in fp32."""
    overlap_comm: bool = True
    reduce_bucket_size: int | None = None
    """In elements, or None for the Trainer's value for `auto`, the hidden size squared."""
    prefetch_bucket_size: int | None = None
    """In elements, stage 3, or None for `deepspeed_file.prefetch_size`, by which the launcher replaces "auto"."""
    persistence_threshold: int | None = None
    """Elements of a weight below which it is never sharded (stage 3), or None for ten times the hidden size."""
    kept_weights: int = KEPT_WEIGHTS
    """Most gathered elements that stay whole from the forward to the backward pass (stage 3)."""
    software: Software = OWN
    sub_group_size: int = 10**9

    @property
    def recomputes_layers(self) -> bool:
        """True if whole layers are recomputed."""
        return self.gradient_checkpointing is True

    @property
    def selective(self) -> bool:
        """True if everything in a layer except matrix products and attention is recomputed."""
        return self.gradient_checkpointing == "selective"

    @property
    def recomputes_feed_forward(self) -> bool:
        """True if feed-forward layers are recomputed; tiled ones always are (`training.model.load`)."""
        return self.gradient_checkpointing == "feed_forward" or self.tiled_mlp

    @property
    def fuses(self) -> bool:
        """True if element-wise operations are fused, by Liger's kernels or by torch.compile."""
        return self.liger_kernel or self.compile

    @cached_property
    def data_parallel_size(self) -> int:
        """Ranks that read different sequences."""
        return data_parallel_size(self.layout, self.world_size)

    @cached_property
    def zero_ranks(self) -> int:
        """Ranks that ZeRO shards over: those that hold the same weights."""
        return self.data_parallel_size * self.layout.sequence

    @property
    def gathers(self) -> bool:
        """True if ZeRO-3 copies weights before use. A single rank uses its shards directly, unless they are offloaded.

        deepspeed 0.19.8, partition_parameters.py, `NoGatherHandle`.
        """
        return self.zero_stage == 3 and (self.zero_ranks > 1 or self.offload_parameters != "none")

    @property
    def sequences_per_pass(self) -> int:
        """Sequences in one forward pass of a rank."""
        return self.micro_batch_size * self.sequences_per_example

    @property
    def own_length(self) -> float:
        """Tokens of a sequence on one rank."""
        return self.sequence_length / self.layout.sequence

    @property
    def tokens_per_pass(self) -> float:
        """Tokens that go through a layer at once on one rank."""
        return self.sequences_per_pass * self.own_length

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step over all ranks, padding included."""
        sequences = self.data_parallel_size * self.sequences_per_pass * self.gradient_accumulation_steps
        return sequences * self.sequence_length

    def prefetched(self, hidden: int, layer: float) -> float:
        """Return the number of elements that ZeRO-3 prefetches, by the hidden size and a layer's weights."""
        return prefetch_size(hidden, int(layer)) if self.prefetch_bucket_size is None else self.prefetch_bucket_size

    def reduced(self, hidden: int) -> int:
        """Return the number of gradients reduced at once, for a model of this hidden size."""
        return hidden**2 if self.reduce_bucket_size is None else self.reduce_bucket_size

    def tiles(self, vocabulary: int) -> bool:
        """Return whether the loss is computed in tiles."""
        tokens = self.labelled_share * self.micro_batch_size * self.sequence_length / self.layout.sequence
        return limits.are_large(tokens, vocabulary) if self.tiled_loss is None else self.tiled_loss

    @property
    def labelled_share(self) -> float:
        """Share of a sequence's tokens whose logits are computed; TRL keeps one more than the answer has."""
        return 1.0 if self.answer_length is None else min(1.0, (self.answer_length + 1) / self.sequence_length)

    @property
    def weight_bytes(self) -> float:
        """Bytes per parameter when weights are transferred, between ranks or from the host."""
        return 0.5 if self.quantized else self.value_bytes

    @property
    def value_bytes(self) -> float:
        """Bytes of an activation or a gradient in the training precision."""
        return 4 if self.precision == "fp32" else 2


OF_RECIPE = (
    *("layout", "micro_batch_size", "sequence_length", "precision", "gradient_checkpointing", "activation_offloading"),
    *("tiled_mlp", "liger_kernel", "lora", "optimizer"),
)
OF_FILE = ("offload_optimizer", "offload_parameters", "partition_size", "kept_weights")
"""Settings that have the same name in the recipe, and in the DeepSpeed file."""


def training_setup(recipe: Recipe, file: DeepSpeedFile, world_size: int) -> TrainingSetup:
    """Return the training setup of a recipe and its DeepSpeed file, which may have `auto`, for all nodes' ranks."""
    zero, bf16, data_types = file.zero, file.content.get("bf16", {}), file.content.get("data_types", {})
    method, micro_batches = recipe.method, gradient_accumulation_steps(recipe, world_size)
    by_server = isinstance(method, Grpo) and method.vllm is not None
    return TrainingSetup(
        world_size=world_size,
        zero_stage=file.stage,
        gradient_accumulation_steps=micro_batches,
        packing=recipe.packs,
        sequences_per_example=method.sequences,
        reference=method.asks_reference,
        teacher_parameters=counts.teacher_parameters(recipe),
        teacher_quantized=isinstance(method, Distill) and method.teacher_quantization != "none",
        scores=method.headless,
        rollout_answers=recipe.micro_batch_size * micro_batches if method.writes_answers and not by_server else 0,
        rollout_gathers=not isinstance(method, Grpo) or method.gather,
        answer_length=method.max_new_tokens if isinstance(method, Grpo) else None,
        attention=recipe.model.attention,
        tiled_loss=method.tiles or limits.asked_for(recipe),
        compile=recipe.compile != "off",
        trained_share=counts.trained_share(recipe),
        saved_parameters=counts.saved_parameters(recipe),
        further_token=recipe.model.train_mtp,
        quantized=recipe.model.quantization != "none",
        bf16_states=bool(bf16.get("bf16_master_weights_and_grads") and bf16.get("bf16_optimizer_states")),
        fp32_accumulation=data_types.get("grad_accum_dtype") in ("fp32", "float32"),
        overlap_comm=bool(zero.get("overlap_comm", file.stage == 3)),
        reduce_bucket_size=_elements(zero, "reduce_bucket_size", 5 * 10**8),
        prefetch_bucket_size=_elements(zero, "stage3_prefetch_bucket_size", 5 * 10**7),
        persistence_threshold=_elements(zero, "stage3_param_persistence_threshold", 10**5),
        sub_group_size=_elements(zero, "sub_group_size", 10**9) or 10**9,
        **{name: getattr(recipe, name) for name in OF_RECIPE},
        **{name: getattr(file, name) for name in OF_FILE},
    )


def _elements(zero: JsonView, key: str, default: int) -> int | None:
    """Return a size in elements, DeepSpeed's default if the key is missing, or None for `auto`."""
    value = zero.get(key, default)
    return None if value == "auto" else int(value)
