"""The techniques that are proven: each trains a small model as a real run does, compared with a plain PyTorch loop.

The plain loop and the compared run share their settings, which take seconds and are exact in fp32.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ..recipe.files import Json, JsonView
from ..recipe.project import CONFIGS
from ..recipe.recipe import Data, Layout, Lora, Model, Recipe, Schedule, Wandb
from ..recipe.run_folder import write_jsonl
from ..recipe.samples import TINY_MODEL


@dataclass(frozen=True)
class Settings:
    """Settings of the reference and the run under test, and the mistakes that a test must detect."""

    steps: int = 6
    learning_rate: float = 1e-2
    weight_decay: float = 0.1
    clip: float = 1.0
    epsilon: float = 1e-5
    """Adam's epsilon. Adam divides each gradient by its size plus epsilon: where a gradient is as small as that, its
    rounding error moves the weight like a gradient of size one. At 1e-8 plain PyTorch in fp32 disagrees with itself in
    fp64 (`test_the_reference_is_exact_enough`), so nothing could be compared with it; at 1e-5 it agrees."""
    router_aux_loss_coef: float = 0.0
    """Weight of an MoE model's load-balancing loss: the mean over conversations of each one's own, padding included."""
    mean_of_means: bool = False
    """Mistake: every conversation has the same weight, however long its answer is."""
    decay_everything: bool = False
    """Mistake: norms are decayed like matrices."""
    learn_prompts: bool = False
    """Mistake: the user's words are in the loss."""
    scaled_experts: float = 1.0
    """Mistake, unless 1: the factor by which the gradients of an MoE model's experts are too large."""


def small(model: Path, data: Path, /, deepspeed: str = "zero0.json", **changes: Any) -> Recipe:
    """Return a recipe for `model` on `data` with everything that costs time or noise turned off."""
    recipe = Recipe(
        family="tiny",
        size="3m",
        variant="full",
        model=Model(path=str(model)),
        data=Data(path=str(data)),
        deepspeed=str(CONFIGS / deepspeed),
        learning_rate=1e-2,
        weight_decay=0.1,
        max_steps=6,
        schedule=Schedule(kind="constant", warmup=0),
        global_batch_size=8,
        micro_batch_size=4,
        sequence_length=128,
        packing=False,
        precision="fp32",
        gradient_checkpointing=False,
        logging_steps=1,
        save_steps=0,
        wandb=Wandb(mode="disabled"),
    )
    return replace(recipe, **changes)


def of_settings(settings: Settings, model: Path, data: Path, deepspeed: str, /, **changes: object) -> Recipe:
    """Return the recipe of the settings on a dataset of eight examples, with all of them in every step."""
    common: Json = {
        "learning_rate": settings.learning_rate,
        "weight_decay": settings.weight_decay,
        "adam_epsilon": settings.epsilon,
        "max_grad_norm": settings.clip,
        "max_steps": settings.steps,
        "global_batch_size": 8,
    }
    return small(model, data, deepspeed, **common | changes)


WHOLE = Layout()
"""Every rank has a replica."""
SETTINGS = Settings(steps=4)
IN_BF16 = Settings(steps=4, learning_rate=1e-3)
"""At fp32's rate, rounding to 8 bits alone leads to other weights within a few steps."""
LORA = Lora(rank=4, alpha=8)
PACKED_ROWS = 4
"""The sequences of `PACKED_LENGTH` tokens that the conversations fill."""
PACKED_LENGTH = 96

Kind = Literal["dense", "adapters", "qlora", "mixture", "bf16"]
"""The kind of plain loop that a technique is compared with."""


def train(run: str) -> None:
    """Train the recipe in a run folder; on every rank."""
    from ..training import run as training_run

    training_run.main(run)


@dataclass(frozen=True)
class Technique:
    """A way of training that must not change the result."""

    name: str
    config: str
    """A file of configs/."""
    layout: Layout = WHOLE
    kind: Kind = "dense"
    packing: bool = False
    changes: JsonView = field(default_factory=dict)
    attention: str = "auto"
    accumulates: bool = False
    device: Literal["any", "cpu", "gpu"] = "any"
    needs_package: str | None = None
    train: Callable[[str], None] = train

    @property
    def smallest(self) -> int:
        """The fewest ranks."""
        return self.layout.tensor * self.layout.pipeline * self.layout.sequence * self.layout.expert

    def ranks(self, most: int) -> int:
        """Return how many of `most` ranks the technique uses: a number that divides the batch."""
        replicas = (PACKED_ROWS if self.packing else 8) * self.layout.tensor * self.layout.pipeline
        return max(number for number in (1, 2, 4, 8) if number <= min(most, replicas * self.layout.sequence))

    def lacks(self, ranks: int, gpus: int) -> str | None:
        """Return why it cannot be proven here, or None if it can."""
        if ranks < self.smallest:
            return f"needs {self.smallest} ranks"
        if self.device == "gpu" and not gpus:
            return "needs a GPU"
        if self.device == "cpu" and gpus:
            return "for CPUs"
        try:
            absent = self.needs_package is not None and importlib.util.find_spec(self.needs_package) is None
        except ModuleNotFoundError:  # its parent package is not installed either
            absent = True
        return f"{self.needs_package} is not installed" if absent else None

    def settings(self) -> Settings:
        """Return the settings that the plain loop and the run share."""
        return IN_BF16 if self.kind == "bf16" else SETTINGS

    def recipe(self, model: Path, data: Path, ranks: int) -> Recipe:
        """Return the recipe, for `ranks(...)` ranks."""
        rows = PACKED_ROWS if self.packing else 8
        copies = ranks // (self.layout.tensor * self.layout.pipeline * self.layout.sequence)
        changes = {
            "model": Model(
                path=str(model), attention=self.attention, quantization="nf4" if self.kind == "qlora" else "none"
            ),
            "layout": self.layout,
            "lora": LORA if self.kind in ("adapters", "qlora") else None,
            "precision": "bf16" if self.kind == "bf16" else "fp32",
            "packing": self.packing,
            "sequence_length": PACKED_LENGTH,
            "global_batch_size": rows,
            "micro_batch_size": max(1, rows // copies // (2 if self.accumulates else 1)),
            **self.changes,
        }
        return of_settings(self.settings(), model, data, self.config, **changes)


TECHNIQUES = (
    Technique("zero0", "zero0.json"),
    Technique("zero1", "zero1.json", accumulates=True),
    Technique("zero2", "zero2.json", changes={"gradient_checkpointing": True}),
    Technique("zero3", "zero3.json", accumulates=True),
    Technique("selective", "zero3.json", changes={"gradient_checkpointing": "selective"}),
    Technique("feed_forward", "zero3.json", changes={"gradient_checkpointing": "feed_forward"}),
    Technique("offload", "zero2_offload.json"),
    Technique("tensor", "zero1.json", Layout(tensor=2), accumulates=True),
    Technique("sequence", "zero2.json", Layout(sequence=2), accumulates=True),
    Technique("pipeline", "zero1.json", Layout(pipeline=2), changes={"micro_batch_size": 1}),
    Technique("expert", "expert_parallel.json", Layout(expert=2), kind="mixture"),
    Technique("adapters", "zero3.json", kind="adapters"),
    Technique("fused_adapters", "zero3.json", kind="adapters", changes={"lora": replace(LORA, fused=True)}),
    Technique("qlora", "zero2.json", kind="qlora", needs_package="bitsandbytes"),
    Technique("packing", "zero2.json", packing=True),
    Technique("tiled_loss", "zero2.json", packing=True, changes={"tiled_loss": True}),
    Technique("eager", "zero1.json", packing=True, attention="eager"),
    Technique("varlen_boundaries", "zero1.json", packing=True, attention="varlen", device="cpu"),
    Technique("varlen", "zero1.json", kind="bf16", packing=True, attention="varlen", device="gpu"),
    Technique("flex", "zero1.json", kind="bf16", packing=True, attention="flex_attention", device="gpu"),
    *(
        Technique(
            f"flash{version}", "zero1.json", kind="bf16", packing=True, attention=f"flash_attention_{version}",
            device="gpu", needs_package=package,
        )
        for version, package in ((2, "flash_attn"), (3, "flash_attn_interface"), (4, "flash_attn.cute"))
    ),
    Technique("compiled", "zero1.json", kind="bf16", packing=True, changes={"compile": "regional"}, device="gpu"),
    Technique(
        "liger", "zero1.json", kind="bf16", packing=True, changes={"liger_kernel": True},
        device="gpu", needs_package="liger_kernel",
    ),
)  # fmt: skip
"""`packing` computes attention with SDPA. `varlen_boundaries` computes one document at a time, where varlen's kernel
would compute all of them: it proves the documents' boundaries, and not the kernel."""


STEEP = 0.2
"""Spread of the initial weights: at the usual 0.02 the output is nearly uniform, and wrong gradients hardly show."""


def conversations(path: Path) -> Path:
    """Write eight conversations whose answers differ in length, so that a wrong weighting is detected."""
    rows = [conversation(f"Count to {n}, please.", " ".join(str(i) for i in range(n))) for n in range(1, 24, 3)]
    write_jsonl(path, rows)
    return path


def conversation(question: str, answer: str) -> Json:
    """Return one conversation in the messages form."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def random_qwen3(folder: Path, seed: int = 0, padding: int = 0, experts: bool = False, **changes: object) -> Path:
    """Write a random Qwen3, dense or with eight experts, with the tokenizer of `tiny`, and return its folder."""
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    sizes: Json = {
        "vocab_size": len(tokenizer) + padding,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": STEEP,
        **{name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
    }
    if experts:
        sizes |= {"hidden_size": 32, "head_dim": 8, "decoder_sparse_step": 1}
        sizes |= {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True}
    else:
        sizes |= {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "tie_word_embeddings": True}
    config = AutoConfig.for_model("qwen3_moe" if experts else "qwen3", **sizes | changes)
    return random_model(folder, config, seed)


def random_model(folder: Path, config: object, seed: int = 0) -> Path:
    """Write a random language model of a configuration with the tokenizer of `tiny`, and return its folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY_MODEL).save_pretrained(folder)
    return folder
