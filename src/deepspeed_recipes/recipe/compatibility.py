"""The table of settings, methods, layouts and DeepSpeed files that cannot be combined, each with reason and remedy.

No other module decides this. `Recipe` refuses the rows that a recipe alone settles, `limits` those that its model, its
DeepSpeed file or the number of ranks settles, and the ranks raise `refusal` for `PROBED`, which only a look at the
model settles. The planner drops candidates by the same rows, `ds-recipes launch --help KEY` prints them, and a part of
configs/README.md is generated from them.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

from .errors import UserError

Moment = Literal["recipe", "model", "run"]
"""What settles a row: the recipe alone, the dimensions of its model, or its DeepSpeed file, layout and ranks."""


@dataclass(frozen=True)
class Case:
    """A recipe, with its DeepSpeed file and the number of ranks where these are known."""

    recipe: Any
    """A `Recipe`, whose module imports this one."""
    file: Any = None
    ranks: int = 1

    def value(self, key: str) -> Any:
        """Return the value of a key, `method.TRAIT`, `file.FIELD` or `file.BLOCK.KEY`; MISSING in an absent section."""
        section, _, name = key.rpartition(".")
        found = self.recipe
        if section == "file":
            found = self.file
        elif section.startswith("file."):
            found = self.file.content.get(section.removeprefix("file."))
            return found.get(name) if isinstance(found, Mapping) else None
        elif section and section == self.recipe.method.name:
            found = self.recipe.method
        elif section:
            found = getattr(self.recipe, section, None)
        return MISSING if found is None else getattr(found, name)

    def dimension(self, *names: str) -> Any:
        """Return the first of several names that the model's configuration has, or None."""
        config = self.recipe.model.config.get("text_config") or self.recipe.model.config
        return next((config[name] for name in names if config.get(name)), None)


MISSING = object()
Values = Mapping[str, Any]
"""Values for the braces in a row's reason and remedy."""
When = str | Callable[[Case], Values | None]
"""A condition: `lora.init=pissa`, `layout.tensor>1`, `method.reference` (is true), several joined by ` and `; or a
function that returns what its reason names, or None if there is no conflict."""


class Row(NamedTuple):
    """A setting, the condition under which it cannot be used, and why."""

    moment: Moment
    setting: str
    when: When
    reason: str
    remedy: str = ""
    """What to do instead, as a clause; empty for layouts, for which `limits` searches the nearest that runs."""


# ---- Architectures ---------------------------------------------------------------------------------------------------

FAMILIES: Mapping[str, Mapping[str, str]] = {
    "tensor": {
        **dict.fromkeys(("bloom", "gpt2"), "its queries, keys and values are one matrix, not cut by heads"),
        **dict.fromkeys(
            (
                *("deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "minimax_m2", "mixtral", "nemotron_h", "olmoe"),
                *("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe"),
            ),
            "its experts, which hold most of its weights, are not split",
        ),
    },
    "sequence": {
        "bloom": "its ALiBi attention would measure distances only within a rank's part of a sequence",
        "lfm2": "its convolutions read the tokens before a rank's part of a sequence, which another rank holds",
        **dict.fromkeys(
            ("falcon_h1", "nemotron_h"),
            "its Mamba layers carry a state along the sequence, of which each rank holds only a part",
        ),
        **dict.fromkeys(
            ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"),
            "its linear attention carries a state along the sequence, of which each rank holds only a part",
        ),
    },
    "pipeline": {},
    "expert": {
        "ernie4_5_moe": "DeepSpeed's AutoEP fails on the shape of its routers' corrections",
        "gpt_oss": "its experts have biases, and those of DeepSpeed's AutoEP have none",
        "nemotron_h": "its experts have no gate projection, and those of DeepSpeed's AutoEP have one",
    },
}
"""Why a kind of parallelism does not train an architecture correctly, by the layout's field and `model_type`."""

TENSOR_PARALLEL_TYPES = (
    *("gemma2", "gemma3_text", "glm4", "gpt_neox", "granite", "llama", "ministral3", "mistral", "olmo3", "phi3"),
    *("qwen2", "qwen3", "qwen3_5_text", "seed_oss", "smollm3"),
)
"""Model types that transformers' plan splits correctly (`tests/test_tensor.py` checks this against every recipe). For
other types `training/parallel/tensor_plan.py` determines which layers can be split, or refuses the run."""
EXPERT_PARALLEL_TYPES = ("deepseek_v2", "deepseek_v3", "mixtral", "qwen3_moe")
"""Model types for which DeepSpeed has a preset with which expert parallelism trains like plain PyTorch
(`tests/parity/test_expert.py`). For other types `training/parallel/expert.py` makes one, or refuses the run."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names in config.json for the number of experts per layer."""
ENDS = frozenset(("embed_tokens", "wte", "embed_in", "word_embeddings", "lm_head", "embed_out", "output"))
"""Names of embeddings and heads, on which adapters do not train in a pipeline: DeepSpeed copies a tied weight between
stages by its name, and the export joins only weights that every stage has."""
NO_CLASSIFIER = (
    *("falcon_h1", "glm4_moe", "granite", "lfm2", "minimax_m2", "nemotron_h", "olmoe", "qwen3_5_moe_text"),
)
"""Model types of the pages for which transformers has no sequence classifier (checked by `tests/test_reward.py`)."""


# ---- Conditions that compare numbers or look into the model's configuration ------------------------------------------


def positions(config: Mapping[str, Any]) -> float:
    """Return a model's number of positions, or infinity if its config does not limit it."""
    return config.get("max_position_embeddings") or config.get("n_positions") or math.inf


def _too_long(case: Case) -> Values | None:
    most = positions(case.recipe.model.config.get("text_config") or case.recipe.model.config)
    return {"most": most} if case.recipe.sequence_length > most else None


def _without_classifier(case: Case) -> Values | None:
    kind = case.dimension("model_type")
    return {"kind": kind} if kind in NO_CLASSIFIER else None


def _beyond_vocabulary(case: Case) -> Values | None:
    size = case.dimension("vocab_size")
    return {"size": size} if size and case.recipe.method.top_k > size else None


def _family(technique: str) -> When:
    def why(case: Case) -> Values | None:
        kind = case.dimension("model_type")
        found = FAMILIES[technique].get(kind) if kind else None
        return {"kind": kind, "why": found} if found else None

    return why


def _method(technique: str) -> When:
    def why(case: Case) -> Values | None:
        found = case.recipe.method.excludes.get(technique)
        return {"why": found} if found else None

    return why


def _not_divisible(*names: str, by: tuple[str, ...]) -> When:
    """Return a condition: a number of the model, the first of `names`, is not divisible by a product of sizes."""

    def why(case: Case) -> Values | None:
        number, size = case.dimension(*names), math.prod(getattr(case.recipe.layout, name) for name in by)
        factors = " (sequence x tensor)" if len(by) > 1 and case.recipe.layout.tensor > 1 else ""
        return {"number": number, "size": f"{size}{factors}"} if number and number % size else None

    return why


def _ranks_left_over(case: Case) -> Values | None:
    layout = case.recipe.layout
    size = layout.tensor * layout.pipeline * layout.sequence
    if case.ranks % size:
        return {"number": f"{case.ranks} ranks", "size": f"{size} (tensor x pipeline x sequence)"}
    if case.ranks // size % layout.expert:
        return {"number": f"{case.ranks // size} data-parallel ranks", "size": f"{layout.expert} (expert)"}
    return None


def _split_by(*names: str) -> When:
    return lambda case: {} if any(getattr(case.recipe.layout, name) > 1 for name in names) else None


def _too_few_layers(case: Case) -> Values | None:
    layers = case.dimension("num_hidden_layers", "n_layer")
    return {"layers": layers} if layers and layers < case.recipe.layout.pipeline else None


def _adapters_at_the_ends(case: Case) -> Values | None:
    targets = case.recipe.lora.target_modules.split(",") if case.recipe.lora else ()
    outside = sorted(name.strip() for name in targets if name.strip().rpartition(".")[2] in ENDS)
    return {"outside": ", ".join(outside)} if outside else None


def _without_experts(case: Case) -> Values | None:
    kind = case.dimension("model_type")
    return {"kind": kind} if kind and not case.dimension(*EXPERT_COUNTS) else None


# ---- The table -------------------------------------------------------------------------------------------------------

_UNTESTED_VISION = "it is not tested with a vision tower"
_UNTESTED_EXPERTS = "it is not tested with experts on several ranks"
_NOT_FUSED = "use lora.fused=false"
_NO_PISSA = "use lora.init=zero"
_NOT_SELECTIVE = "use gradient_checkpointing=true or feed_forward"
_NOT_TILED = "use tiled_loss=false"
_STOP = "set save_steps above 0, or use {key}=stop"

_OWN_BLOCK = "its optimizer block would replace the recipe's optimizer and its learning rates"
_NO_BLOCK = "remove the block, or use another file"
_NOT_ADAMW = "use optimizer=adamw, or deepspeed=zero{stage}.json"
_PISSA_PARTS = "PiSSA decomposes whole matrices of the whole model, and each rank has a part of it"
_ADAM_8_BITS = "bitsandbytes' optimizer is tested with data and sequence parallelism only"

RECIPE: Mapping[tuple[str, str], Mapping[When, str]] = {
    ("eval_examples>0", "add eval_steps=100"): {"eval_steps=none": "it is measured during training"},
    ("lora.init=pissa", _NO_PISSA): {
        "model.quantization!=none": (
            "PiSSA moves a part of each weight into the adapter, which 4-bit weights do not allow"
        ),
        "lora.dora=true": "DoRA's magnitudes are those of the weights before PiSSA changes them",
        "lora.target_parameters!=none": "PEFT decomposes linear layers only",
        "method.reference": "without its adapters the model is not {method}'s reference",
    },
    ("lora.fused=true", _NOT_FUSED): {
        "lora.dora=true": "DoRA rescales the sum of both outputs, so the product cannot simply be added",
        "gradient_checkpointing=selective": "it keeps layers' outputs, and fused adapters add to them in place",
        "compile!=off": "compiled layers fuse scaling and addition themselves",
    },
    ("neftune_alpha>0", "use neftune_alpha=0"): {"method.packs=false": "NEFTune is for sft and pretrain"},
    ("optimizer=muon", "use optimizer=adamw, or a full variant"): {
        "lora!=none": "Muon orthogonalises updates of whole matrices, and an adapter is a product of two matrices"
    },
    ("max_grad_norm>0", "set max_grad_norm=0"): {
        "optimizer=muon": (
            "DeepSpeed would clip the orthogonalised updates, whose norm is far above 1 whatever the gradients are"
        ),
    },
    ("optimizer=muon", "use precision=bf16"): {"precision=fp16": "Muon is tested in bf16 and fp32"},
    ("gradient_checkpointing=selective", _NOT_SELECTIVE): {
        "compile!=off": "compiled layers choose by themselves what to keep",
        "tiled_mlp=true": "it would keep the activations that tiles discard",
        "model.vision=true": _UNTESTED_VISION,
    },
    # Cases that need the setting itself removed come first: after fixing another key, the user would be refused again.
    ("activation_offloading=true", "use activation_offloading=false"): {"model.vision=true": _UNTESTED_VISION},
    ("activation_offloading=true", "use gradient_checkpointing=true"): {
        "gradient_checkpointing!=true": "it moves the layers' inputs that gradient checkpointing keeps"
    },
    ("activation_offloading=true", "use compile=off"): {"compile!=off": "it is not tested with compiled layers"},
    ("activation_offloading=true", "use layout.pipeline=1"): {
        "layout.pipeline>1": "stages keep their inputs themselves"
    },
    ("fp8=true", "use fp8=false"): {
        "lora!=none": "adapters' products are too small to gain",
        "model.vision=true": _UNTESTED_VISION,
    },
    ("fp8=true", "use precision=bf16"): {"precision!=bf16": "weights and gradients stay in bf16"},
    ("fp8=true", "use layout.tensor=1"): {"layout.tensor>1": "DeepSpeed replaces the layers that it splits"},
    ("fp8=true", "use layout.pipeline=1"): {"layout.pipeline>1": "it is not tested with a pipeline's stages"},
    ("fp8=true", "use layout.expert=1"): {"layout.expert>1": _UNTESTED_EXPERTS},
    ("model.train_vision=true", "add model.vision=true"): {
        "model.vision=false": "the model is loaded without its vision tower"
    },
    ("method.name=distill", "leave out distill.teacher"): {
        "model.vision=true": "only supervised fine-tuning reads images"
    },
    ("method.name!=sft", "train the variant full or lora"): {
        "model.vision=true": "only supervised fine-tuning reads images"
    },
    ("packing=true", "set packing=false"): {"model.vision=true": "sequences with images are not packed"},
    ("data.streaming=true", "set data.streaming=false"): {"model.vision=true": _UNTESTED_VISION},
    ("layout.tensor>1", "set layout.tensor=1"): {"model.vision=true": "tensor parallelism does not split the tower"},
    ("layout.pipeline>1", "set layout.pipeline=1"): {"model.vision=true": "a pipeline has no stage for the tower"},
    ("layout.sequence>1", "set layout.sequence=1"): {"model.vision=true": "images are not split"},
    ("layout.expert>1", "set layout.expert=1"): {"model.vision=true": _UNTESTED_EXPERTS},
    ("neftune_alpha>0", "set neftune_alpha=0"): {"model.vision=true": "the noise would be added to images too"},
    ("layer_decay<1", "set layer_decay=1"): {"model.vision=true": "the tower has its own layers"},
    ("tiled_mlp=true", "set tiled_mlp=false"): {"model.vision=true": _UNTESTED_VISION},
    ("compile!=off", "set compile=off"): {"model.vision=true": _UNTESTED_VISION},
    ("liger_kernel=true", "set liger_kernel=false"): {"model.vision=true": _UNTESTED_VISION},
    ("data.streaming=true", "remove data.streaming"): {
        "method.packs=false": "{title} reads all {examples} before training starts",
    },
    ("data.max_examples>0", "use data.max_examples=none, and end it with max_steps"): {
        "data.streaming=true": "a stream cannot be sampled",
    },
    ("data.streaming=true", "add max_steps=1000 or another number"): {"max_steps=none": "a stream has no length"},
    ("data.validation_share!=0", "set data.validation to a file"): {
        "data.streaming=true and data.validation=none": "a stream cannot be split",
    },
    ("data.thinking!=learn", "leave data.thinking out, and edit the reasoning in the data"): {
        "method.examples!=conversations": "{title} reads no conversations"
    },
    ("router_aux_loss_coef>0", "use router_aux_loss_coef=0"): {
        "method.own_loss": "{title} trains without the load-balancing loss of a mixture of experts"
    },
    ("model.quantization!=none", "add adapters, e.g. lora.rank=16, or use the variant qlora"): {
        "lora=none": "4-bit weights cannot be trained"
    },
    ("tiled_loss=true", _NOT_TILED): {
        "method.whole_loss": "{whole_loss}",
        "layout.pipeline>1": "a pipeline's last stage returns whole logits",
        "router_aux_loss_coef>0": "TRL's tiles use the model's own coefficient",
    },
    ("on_nan=rewind", _STOP.format(key="on_nan")): {"save_steps=0": "it needs checkpoints to return to"},
    ("on_nan=rewind", "use on_nan=stop"): {"data.streaming=true": "it needs numbered examples"},
    ("on_spike=rewind", _STOP.format(key="on_spike")): {"save_steps=0": "it needs checkpoints to return to"},
    ("on_spike=rewind", "use on_spike=stop"): {"data.streaming=true": "it needs numbered examples"},
}
"""Settings of a recipe that exclude each other: a setting and the remedy, then the conditions and the reasons."""

MODEL: Mapping[tuple[str, str], Mapping[When, str]] = {
    ("sequence_length", "set sequence_length={most}"): {_too_long: "the model has {most:,} positions"},
    ("method.scores", "use another family (ds-recipes launch --list)"): {
        _without_classifier: (
            "{title} needs a classification model, which transformers does not have for the type {kind}"
        ),
    },
    ("distill.teacher=none", "give a model folder or a Hub id"): {lambda _: {}: "there is no model to learn from"},
    ("distill.top_k>0", "use fewer, such as 64"): {_beyond_vocabulary: "the vocabulary has {size:,} tokens"},
}
"""Settings that do not suit the model."""

FILE: Mapping[tuple[str, str], Mapping[When, str]] = {
    ("optimizer!=adamw", _NO_BLOCK): {"file.optimizer!=none and layout.expert=1": _OWN_BLOCK},
    ("layer_decay<1", _NO_BLOCK): {"file.optimizer!=none and layout.expert=1": _OWN_BLOCK},
    ("lora.plus_ratio!=1", _NO_BLOCK): {"file.optimizer!=none and layout.expert=1": _OWN_BLOCK},
    ("lora.fused=true", _NOT_FUSED): {"file.deepcompile": "DeepCompile fuses scaling and addition itself"},
    ("optimizer!=adamw", _NOT_ADAMW): {
        "file.offload_optimizer!=none": "DeepSpeed updates offloaded states with its own AdamW",
        "file.bf16.bf16_optimizer_states": "bf16_optimizer_states is for Adam",
    },
    ("optimizer=muon", "use deepspeed=zero1.json"): {
        "file.stage=0 and precision!=fp32": "without ZeRO DeepSpeed's Muon trains in fp32 only"
    },
    ("optimizer=muon", "use deepspeed=zero3.json"): {
        "file.partition_size>1": "Muon needs whole gradients, so neither hpZ nor quantised gradients",
        "file.zero_optimization.zero_quantized_gradients": (
            "Muon needs whole gradients, so neither hpZ nor quantised gradients"
        ),
    },
    ("optimizer=muon", "use the file without that key"): {
        "file.zero_optimization.reduce_scatter=true and file.stage=3": (
            "Muon needs whole gradients, so not reduce_scatter: true"
        ),
    },
    ("optimizer=muon", "use deepspeed=zero{stage}.json"): {"file.deepcompile": "DeepCompile is tested with AdamW only"},
    ("compile!=off", "use deepspeed=zero2.json, or leave compile out"): {
        "file.stage=3": "ZeRO-3 fetches weights between kernels"
    },
    ("layer_stats=true", "use deepspeed=zero1.json"): {
        "file.stage>1 and layout.tensor>1": "it does not work with tensor parallelism under ZeRO-{stage}"
    },
}
"""Settings that a DeepSpeed file or a layout excludes."""

LAYOUT: Mapping[str, Mapping[When, str]] = {
    "layout": {_ranks_left_over: "{number} are not divisible by {size}"},
    "file.partition_size>1": {
        _split_by("tensor", "pipeline", "sequence", "expert"): (
            "zero_hpz_partition_size={partition_size} works with data parallelism only"
        ),
    },
    "layout.expert>1": {
        "gradient_checkpointing=selective": (
            "gradient_checkpointing=selective is not tested with experts on several ranks"
        ),
        _family("expert"): "expert parallelism does not support {kind}: {why}",
        _without_experts: "{kind} has no experts",
        _not_divisible(*EXPERT_COUNTS, by=("expert",)): "the model's {number} experts are not divisible by {size}",
        # AutoEP finds no experts in a pipeline's stages: `test_deepspeed_distributes_no_experts_in_a_pipeline`.
        _split_by("tensor", "pipeline", "sequence"): (
            "expert parallelism cannot be combined with tensor, pipeline or sequence parallelism"
        ),
        "lora!=none": "DeepSpeed's AutoEP replaces the expert layers together with their adapters",
        _method("expert"): "{why}",
        "optimizer=muon": "AdamW would train the experts, which are stacks of matrices and hold most of the weights",
        "optimizer=adamw_8bit": _ADAM_8_BITS,
        "layer_decay<1": "DeepSpeed's AutoEP puts all experts into one parameter group, which has one learning rate",
        "file.stage=0": "without ZeRO, DeepSpeed computes a wrong gradient norm under expert parallelism",
    },
    "layout.tensor>1": {
        # The second sum would start from the first, and gradients would be too large.
        "gradient_checkpointing=selective": (
            "gradient_checkpointing=selective keeps the products that tensor parallelism sums in place"
        ),
        _family("tensor"): "tensor parallelism does not support {kind}: {why}",
        _not_divisible("num_attention_heads", "n_head", by=("tensor",)): (
            "the model's {number} attention heads are not divisible by {size}"
        ),
        _not_divisible("num_key_value_heads", by=("tensor",)): (
            "the model's {number} key/value heads are not divisible by {size}"
        ),
        "model.quantization!=none": "packed 4-bit weights cannot be split by rows or columns",
        "lora.dora=true": "DoRA needs the norm of each whole matrix",
        _method("tensor"): "{why}",
        "optimizer=muon": "Muon orthogonalises whole matrices, and a tensor-parallel rank has parts of them",
        "optimizer=adamw_8bit": _ADAM_8_BITS,
        "lora.init=pissa": _PISSA_PARTS,
        "lora.fused=true": "a rank has a part of each adapter, whose products are summed over ranks one by one",
    },
    "layout.sequence>1": {
        _family("sequence"): "sequence parallelism does not support {kind}: {why}",
        _not_divisible("num_attention_heads", "n_head", by=("sequence", "tensor")): (
            "the model's {number} attention heads are not divisible by {size}"
        ),
        _method("sequence"): "{why}",
        "neftune_alpha>0": "NEFTune's noise depends on the length of a document, and each rank has only a part of it",
        "router_aux_loss_coef>0": (
            "the load-balancing loss covers whole sequences, and each rank has the routing of only a part"
        ),
    },
    "layout.pipeline>1": {
        _family("pipeline"): "pipeline parallelism does not support {kind}: {why}",
        _too_few_layers: "every stage needs at least one layer, and the model has {layers}",
        _method("pipeline"): "{why}",
        "optimizer=muon": "DeepSpeed's Muon is tested with data parallelism, and not with its pipeline",
        "optimizer=adamw_8bit": _ADAM_8_BITS,
        "layer_decay<1": "a pipeline's layers have other names, from which layer_decay cannot read their depth",
        "lora.plus_ratio!=1": "LoRA+ is tested with whole models, and not with a pipeline's stages",
        "lora.init=pissa": _PISSA_PARTS,
        "neftune_alpha>0": "NEFTune is tested with whole models, and not with a pipeline's stages",
        "model.quantization!=none": (
            "4-bit weights are packed on a rank that holds the whole model, and a stage holds only a part"
        ),
        _adapters_at_the_ends: "its first and its last stage would have different adapters ({outside})",
        "router_aux_loss_coef>0": (
            "the load-balancing loss covers all routers, and a stage has only its own layers' routers"
        ),
        "file.stage>1": "DeepSpeed's pipeline supports ZeRO 0 and 1 only",
    },
}
"""Layouts that do not train with the rest of the recipe, which `limits` answers with the nearest layout that runs."""

TABLE: tuple[Row, ...] = (
    *(Row("recipe", setting, *row, remedy) for (setting, remedy), rows in RECIPE.items() for row in rows.items()),
    *(Row("model", setting, *row, remedy) for (setting, remedy), rows in MODEL.items() for row in rows.items()),
    *(Row("run", setting, *row, remedy) for (setting, remedy), rows in FILE.items() for row in rows.items()),
    *(Row("run", setting, *row) for setting, rows in LAYOUT.items() for row in rows.items()),
)
"""Every combination that is refused before a model is loaded, in the order in which they are checked."""

PROBED: Mapping[str, str] = {
    "old DeepSpeed": (
        "layout.{key}={size}: DeepSpeed {installed} {why}: pip install 'deepspeed>={first}', or layout.{key}=1."
    ),
    "layout of a checkpoint": (
        "layout.{name}={size}: {checkpoint} was written with {saved}, and DeepSpeed cannot convert that; use "
        "layout.{name}={saved}."
    ),
    "too few layers": "layout.pipeline={size}: the model has {layers} layers; use at most that many stages.",
    "foreign pipeline": (
        "layout.pipeline={size}: stages need a model whose code is in transformers, in 16 or 32 bits; use "
        "layout.pipeline=1."
    ),
    "pipeline of another class": (
        "layout.pipeline={size}: {kind} is not a language model that transformers loads by itself; name the "
        "folder of its text model, or train it with layout.pipeline=1."
    ),
    "pipeline not checked": (
        "layout.pipeline={size}: cannot be checked on a shrunken {kind}: {error}; use layout.pipeline=1."
    ),
    "pipeline differs": (
        "layout.pipeline={size}: {kind} computes different logits in stages (they differ by {difference:.0e}); "
        "use layout.pipeline=1."
    ),
    "pipeline of another shape": (
        "layout.pipeline: {kind} is not a decoder of the usual shape (an embedding, one list of num_hidden_layers "
        "layers, a norm, a head); use layout.pipeline=1."
    ),
    "no router logits": (
        "router_aux_loss_coef={weight}: AutoEP returns router logits for {kinds} only; set it to 0, or use "
        "layout.expert=1."
    ),
    "noisy routers": (
        "layout.expert: {name}={value} in {path}/config.json adds noise to the routers' inputs, and DeepSpeed's "
        "AutoEP adds none; set it to 0 there, or use layout.expert=1."
    ),
    "experts not checked": "layout.expert: cannot be checked on a shrunken {kind}: {error}; use layout.expert=1.",
    "no experts found": "layout.expert: AutoEP finds no layers of experts in {kind}; use layout.expert=1.",
    "experts differ": (
        "layout.expert: DeepSpeed's AutoEP does not compute {kind}'s experts as transformers does ({error}); use "
        "layout.expert=1."
    ),
    "width of a layer": (
        "layout.tensor={size}: a layer's width of {width} is not divisible by {size}; use layout.tensor=1."
    ),
    "split inputs": "layout.tensor: this model needs DeepSpeed 0.19.8 or later; pip install -U deepspeed.",
    "heads of a type": (
        "layout.tensor={size}: the model's {heads} {name} are not divisible by {size}; use a size that divides them."
    ),
    "no layers to split": "layout.tensor: none of the layers of {kind} can be split ({error}); use layout.tensor=1.",
    "no heads to share": (
        "layout.sequence={size}: {kind} has no attention heads that ranks could share; its layers carry a state "
        "along the sequence; leave layout.sequence out."
    ),
    "heads of a sequence": (
        "layout.sequence={size}: each rank's {heads} attention heads are not divisible by {size}; use a size that "
        "divides them."
    ),
    "sequence differs": (
        "layout.sequence={size}: {kind} with model.attention={attention} trains differently over several ranks "
        "({error}); use layout.sequence=1."
    ),
}
"""What only the model itself, a checkpoint or the installed DeepSpeed settles."""

# ---- Reading the table -----------------------------------------------------------------------------------------------


def refusal(row: str, **values: Any) -> UserError:
    """Return the error for a row of `PROBED`."""
    return UserError(PROBED[row].format(**values))


def check(case: Case, moment: Moment) -> None:
    """Refuse a case by the rows of a moment that have a remedy; `limits` refuses layouts, with the nearest that runs.

    Raises:
        UserError: the settings, the reason and the remedy.
    """
    for row, values in conflicts(case, moment):
        if row.remedy:
            reason, remedy = row.reason.format(**values), row.remedy.format(**values)
            raise UserError(f"{_shown(case, row)}: {reason}; {remedy}.")


def reasons(case: Case, settings: Collection[str] | None = None) -> Iterator[str]:
    """Yield why a recipe does not train with its layout and its DeepSpeed file, by all rows or those of `settings`."""
    for row, values in conflicts(case, "run"):
        if settings is None or row.setting in settings:
            yield row.reason.format(**values)


def conflicts(case: Case, moment: Moment) -> Iterator[tuple[Row, Values]]:
    """Yield the rows of a moment that refuse a case, with the values that their texts name."""
    for row in TABLE:
        if row.moment != moment or not _holds(case, row.setting):
            continue
        values = row.when(case) if callable(row.when) else {} if _holds(case, row.when) else None
        if values is not None:
            method, file = case.recipe.method, case.file
            known = {"method": method.name} | {
                name: getattr(method, name) for name in ("title", "examples", "whole_loss")
            }
            known |= {"stage": file.stage, "partition_size": file.partition_size} if file else {}
            yield row, {**known, **values}


def beside(key: str) -> Iterator[str]:
    """Yield the settings that a key cannot be combined with, each with the reason: a line of `--help KEY`."""
    for row in TABLE:
        if not callable(row.when) and "{" not in row.reason:
            for one, other in ((row.setting, row.when), (row.when, row.setting)):
                if _parsed(one)[0][0] == key:
                    named = other.replace("file.", "the DeepSpeed file's ")
                    yield f"{one} with {named}: {row.reason}"


def _shown(case: Case, row: Row) -> str:
    """Return a row's settings as typed: `lora.init=pissa with model.quantization=nf4`."""
    first = _as_typed(case, row.setting)
    if callable(row.when):
        return first.removeprefix("without ") + " is not set" if first.startswith("without ") else first
    second = _as_typed(case, row.when)
    return f"{first} {second if second.startswith('without ') else f'with {second}'}"


def _as_typed(case: Case, condition: str) -> str:
    key = _parsed(condition)[0][0]
    if key.startswith("file."):
        return f"deepspeed={case.file.name}"
    if key.startswith("method."):
        return f"method={case.recipe.method.name}"
    value = case.value(key)
    if value is None:
        return f"without {key}"
    return "adapters" if is_dataclass(value) else f"{key}={_typed(value)}"


def _typed(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


@cache
def _parsed(condition: str) -> tuple[tuple[str, str, str], ...]:
    """Return the keys, operators and values of a condition's parts."""
    parts = (re.fullmatch(r"([\w.]+)(?:(!=|[=<>])(.+))?", part) for part in condition.split(" and "))
    return tuple((part[1], part[2] or "", part[3] or "") for part in parts if part)


def _holds(case: Case, condition: str) -> bool:
    return all(_compared(case.value(key), operator, text) for key, operator, text in _parsed(condition))


def _compared(value: Any, operator: str, text: str) -> bool:
    if value is MISSING or not operator:
        return value is not MISSING and bool(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if operator in "<>":
        return is_number and (value > float(text) if operator == ">" else value < float(text))
    same = value == float(text) if is_number and text[-1].isdigit() else _typed(value) == text
    return same == (operator == "=")
