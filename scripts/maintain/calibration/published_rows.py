"""Reads the rows of published tables: models, settings, GPUs and measurements.

`measurements/published/` has a file per table; `measurements/README.md` describes how rows are collected and divided.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from deepspeed_recipes.planning.cost.training_setup import Software, TrainingSetup
from deepspeed_recipes.planning.hardware.cluster import Cluster
from deepspeed_recipes.planning.hardware.gpus import Gpu, find, with_memory
from deepspeed_recipes.recipe.deepspeed_file import KEPT_WEIGHTS
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.recipe import Layout, Lora, Precision

from . import MEASUREMENTS

PUBLISHED = MEASUREMENTS / "published"
QUESTIONS = MEASUREMENTS / "questions" / "fit_or_not.json"
"""Public questions of the form "does X fit on Y", with the outcome in the thread."""
GIB_PER_GB = 1e9 / 2**30

HEAD = ("publisher", "source", "stack", "memory_is", "memory_unit", "unseen")
"""Keys of a table that apply to all of its rows."""
SPLIT_ALL = ("Megatron", "torchtitan")
"""Software whose tensor parallelism divides all activations and the vocabulary (arXiv:2205.05198); DeepSpeed's AutoTP
divides only what is inside a layer's matrices."""
SAME_STACK = ("Hugging Face", "own loop with FSDP and PEFT")
"""Prefixes of the names of stacks that compute with transformers' layers."""

PRECISIONS: dict[str, Precision] = {name: name for name in get_args(Precision)}
"""Precisions that the planner supports; rows with others are not planned."""

Share = Literal["fitted", "held out", "unseen"]
SHARES: tuple[Share, ...] = get_args(Share)


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """One run as described in its source. A field that the source omits has the default of the source's software."""

    table: str
    """File name without `.json`."""
    publisher: str
    """The repository or site, which determines the share."""
    source: str
    stack: str
    """The training software."""
    model: str
    """`recipe-size`, or a Hub id in `published_models.json`."""
    method: Literal["full", "lora", "qlora"]
    gpus: int
    sequence_length: int | None
    """In tokens; None if not stated."""
    micro_batch_size: int
    states: str
    """States of trained weights: `fp32` next to bf16 weights, only `bf16`, or a description of other states."""
    sharding: Literal["none", "zero1", "zero2", "zero3", "fsdp"]
    attention: str
    checkpointing: bool | Literal["selective", "offloaded"] | None
    """None if not stated."""
    packing: bool
    """Sequences hold several documents, which do not attend to each other or whose mask costs nothing."""
    unseen: bool = False
    """The publisher was added after the last look at the held-out rows; the row only judges earlier changes."""
    gpu: str | None = None
    """Name in the source; None if only the memory is stated."""
    gpu_memory_gib: float | None = None
    """Memory in the source, if the planner lacks the GPU or has it with another memory."""
    gpus_per_node: int | None = None
    """None for one node."""
    network_gbs: float = 0.0
    """Bandwidth of a node; 0 stands for the GPU's usual network."""
    network_stated: bool = True
    """Whether the source states the network, or implies it by the machine's name. The network determines the speed of
    exchanges between nodes and between GPUs without NVLink."""
    offload: Literal["none", "optimizer", "parameters", "all"] = "none"
    """`parameters` as in FSDP, including gradients and optimizer; `all` is ZeRO-3's parameters and optimizer."""
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    expert: int = 1
    accumulation: int = 1
    precision: str = "bf16"
    rank: int | None = None
    targets: str | None = None
    dropout: float | None = 0.0
    dora: bool = False
    quantization: Literal["none", "nf4", "gptq"] = "none"
    fp32_adapters: bool = False
    """As in `Software`."""
    fp32_activations: bool = False
    """As in `Software`."""
    frozen_fp32: bool = False
    """As in `Software`."""
    grouped_experts: bool = False
    """Experts are one tensor and multiplied together, as in transformers 5; assumed for all other software."""
    liger: bool = False
    """Liger's kernels, with its fused loss unless `whole_logits`."""
    whole_logits: bool = False
    """Liger's kernels without its fused loss: all logits exist at once."""
    chunked_loss: bool = False
    logit_bytes: float | None = None
    """Bytes per token and vocabulary entry of uncapped bf16 logits in the row's software, twice as many in fp32. None
    stands for the current transformers."""
    reduce_bucket_size: int | None = None
    """In elements; None stands for the Trainer's value."""
    tiled_mlp: bool = False
    foreach_adam: bool = False
    """As in `Software`: torch's AdamW without `fused`, the Trainer's default up to transformers 4.56 or torch
    2.7."""
    compile: bool = False
    preferences: bool = False
    """DPO."""
    fits: bool = True
    """False if the run went out of memory."""
    memory: float | None = None
    """Memory per GPU, in `memory_unit`."""
    memory_is: Literal["allocated", "reserved", "device", "not stated"] = "not stated"
    memory_unit: str = "GiB"
    tokens_per_second_per_gpu: float | None = None
    step_seconds: float | None = None
    seconds: float | None = None
    """Duration of the whole run, if `tokens_per_second_per_gpu` was derived from it."""
    address: str | None = None
    """The thread's address, for a question."""
    note: str | None = None
    not_planned: str | None = None
    """Why the row cannot be compared with the planner, if no rule below covers the reason."""
    time_not_planned: str | None = None

    def __str__(self) -> str:
        """Return a one-line description."""
        gpu = self.gpu or f"{self.gpu_memory_gib:g} GiB"
        place = f"{self.sharding}, offload {self.offload}" if self.offload != "none" else self.sharding
        return (
            f"{self.table}: {self.model} {self.method}, {self.gpus} x {gpu}, {place}, "
            f"{self.micro_batch_size} x {self.sequence_length} tokens"
        )

    @property
    def share(self) -> Share:
        """The row's share. The hash of a publisher's name assigns all of its rows, so that nobody chooses."""
        if self.unseen:
            return "unseen"
        return "held out" if hashlib.sha256(self.publisher.encode()).digest()[0] % 2 else "fitted"

    @property
    def memory_gib(self) -> float | None:
        """The measured memory. `GB` of 10^9 bytes is converted; an unstated unit is read as GiB."""
        if self.memory is None:
            return None
        return self.memory * (GIB_PER_GB if self.memory_unit.startswith("GB of 10^9") else 1.0)

    @property
    def speed(self) -> float | None:
        """Measured tokens per second and GPU."""
        if self.tokens_per_second_per_gpu or not self.step_seconds:
            return self.tokens_per_second_per_gpu
        return self.setup.tokens_per_step / self.step_seconds / self.gpus

    @property
    def known_gpu(self) -> Gpu | None:
        """The GPU, or None if the planner has none of this name."""
        try:
            return find(self.gpu) if self.gpu else None
        except UserError:
            return None

    @property
    def cluster(self) -> Cluster:
        """The machines. An unknown GPU is replaced by one with the same memory."""
        per_node = min(self.gpus_per_node or self.gpus, self.gpus)
        known, gib = self.known_gpu, self.gpu_memory_gib
        if known:
            known = replace(known, memory_gib=gib or known.memory_gib)
        gpu = known or with_memory(gib or 0.0, self.gpu)
        return Cluster(gpu, per_node, self.gpus // per_node, network_gbs=self.network_gbs)

    @property
    def lora(self) -> Lora | None:
        """The adapters."""
        if self.method == "full":
            return None
        return Lora(
            rank=self.rank or 16,
            dropout=self.dropout or 0.0,
            target_modules=self.targets or "all-linear",
            dora=self.dora,
        )

    @property
    def is_same_stack(self) -> bool:
        """True if the run used transformers' layers, as this project does."""
        return self.stack.startswith(SAME_STACK)

    @property
    def runs_as_here(self) -> bool:
        """True if the run also used DeepSpeed, DDP or one GPU; this project never uses FSDP."""
        return self.is_same_stack and self.sharding != "fsdp"

    @property
    def setup(self) -> TrainingSetup:
        """The run's training setup for the planner."""
        assert self.sequence_length is not None, self
        zero_three = self.sharding in ("zero3", "fsdp")
        return TrainingSetup(
            self.gpus,
            Layout(self.tensor, self.pipeline, self.sequence, self.expert),
            zero_stage=3 if zero_three else int(self.sharding.removeprefix("zero").replace("none", "0")),
            micro_batch_size=self.micro_batch_size,
            gradient_accumulation_steps=self.accumulation,
            sequence_length=self.sequence_length,
            gradient_checkpointing=self.checkpointing is True,  # `selective` keeps other results in other software
            packing=self.packing,
            sequences_per_example=2 if self.preferences else 1,
            reference=self.preferences,
            precision=PRECISIONS.get(self.precision, "bf16"),
            attention=self.attention,
            lora=self.lora,
            quantized=self.method == "qlora",
            tiled_loss=(self.liger and not self.whole_logits) or self.chunked_loss,
            kept_weights=0 if self.sharding == "fsdp" else KEPT_WEIGHTS,
            reduce_bucket_size=self.reduce_bucket_size,
            tiled_mlp=self.tiled_mlp,
            liger_kernel=self.liger,
            compile=self.compile,
            offload_optimizer="none" if self.offload == "none" else "cpu",
            offload_parameters="cpu" if self.offload in ("parameters", "all") else "none",
            bf16_states=self.states == "bf16",
            software=Software(
                frozen_fp32=self.frozen_fp32,
                logit_bytes=self.logit_bytes,
                foreach_adam=self.foreach_adam,
                fp32_adapters=self.fp32_adapters,
                fp32_activations=self.fp32_activations,
                grouped_experts=self.grouped_experts or not self.is_same_stack,
            ),
        )

    @property
    def why_memory_is_not_planned(self) -> str | None:
        """The reason why the planner cannot predict the row's memory, or None if it can."""
        rules = {
            "the length of its sequences is not stated": self.sequence_length is None,
            "whether it checkpoints is not stated": self.checkpointing is None,
            "the planner does not offload activations": self.checkpointing == "offloaded",
            "its tensor parallelism divides all activations": self.tensor > 1 and self.stack in SPLIT_ALL,
            f"the planner does not support {self.precision}": self.precision not in PRECISIONS,
            "all of DeepSpeed's optimizers hold master weights": self.method == "full" and self.states != "fp32",
            "the GPU and its memory are not stated": not (self.known_gpu or self.gpu_memory_gib),
            "DeepSpeed divides experts among data-parallel ranks only": self.expert * self.tensor * self.pipeline
            > self.gpus,
        }
        return self.not_planned or next((why for why, applies in rules.items() if applies), None)

    @property
    def can_be_planned(self) -> bool:
        """Whether a user could ask `plan` for this run, however unusual its software, its timing or its machine."""
        stated = self.sequence_length is not None and self.checkpointing is not None and self.known_gpu is not None
        known = self.precision in PRECISIONS and self.checkpointing != "offloaded"
        return stated and known and self.expert * self.tensor * self.pipeline <= self.gpus

    @property
    def why_time_is_not_planned(self) -> str | None:
        """The reason why the planner cannot predict the row's time, or None if it can."""
        if self.time_not_planned:
            return self.time_not_planned
        if self.known_gpu is None:
            return f"the planner has no GPU {self.gpu}" if self.gpu else "the GPU is not named"
        if not self.network_stated and self.cluster.nodes > 1:
            return "the network between its nodes is not stated"
        if not self.network_stated and self.gpus > 1 and not self.cluster.gpu.link_gbs:
            return "how its GPUs without NVLink are connected is not stated"
        if self.liger and not self.whole_logits and self.method == "full":
            return "Liger's fused loss, which this project does not use, sums the head's gradient in many small pieces"
        if self.quantization != "none" and (
            self.precision == "fp32" or (self.fp32_activations and self.attention == "sdpa")
        ):
            return "attention and head of a 4-bit model are in fp32 without autocast, which this project never does"
        if "autocast" in self.states:
            return "autocast converts fp32 weights at each use"
        why = self.why_memory_is_not_planned
        return None if why and why.startswith("all of DeepSpeed's") else why


def published_rows(folder: Path = PUBLISHED) -> list[PublishedRow]:
    """Return the rows of all tables."""
    return [row for file in sorted(folder.glob("*.json")) for row in read(file)]


def questions(file: Path = QUESTIONS) -> list[PublishedRow]:
    """Return the public questions; nothing is ever fitted on them."""
    return list(read(file))


def read(file: Path) -> Iterator[PublishedRow]:
    """Yield a table's rows: `common` applies to all of them, `columns` names the values of each row.

    Raises:
        TypeError: a column is unknown, or a field without a default is missing.
    """
    table: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    head = {key: table[key] for key in HEAD if key in table}
    for row in table["rows"]:
        own = dict(zip(table["columns"], row, strict=True))
        yield PublishedRow(table=file.stem, **{**head, **table["common"], **own})
