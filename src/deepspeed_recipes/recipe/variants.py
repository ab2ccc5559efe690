"""The variants that every page inherits, and the functions that make them.

`INHERITED` is the table: a page that defines `full` and `lora` has all of them. A page overrides one by defining a
function of that name, and leaves one out by `WITHOUT = {"qlora": "reason"}`; `recipe/pages.py` reads both.

Each function here takes a recipe and returns it changed. A page that overrides a variant passes what is particular to
its family: `variants.dpo(lora(size), learning_rate=5e-6, global_batch_size=32)`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from .compatibility import FAMILIES
from .methods import Classify, Distill, Dpo, Embed, Grpo, Kto, Orpo, Pretrain, Reward, Simpo
from .recipe import Layout, Model, Recipe, Schedule
from .samples import JUDGED, LABELLED, MATCHING, PREFERENCES, REWARDS, TEXT

ATTENTION = "q_proj,k_proj,v_proj,o_proj"
EXPERTS = "mlp.experts.gate_up_proj,mlp.experts.down_proj"
"""`Lora.target_modules` and `Lora.target_parameters` for MoE models. transformers fuses a layer's experts into 3-D
weights, which are not linear layers, so `all-linear` would miss them. The router stays frozen."""
DPO_LENGTH = 2048
"""Maximum tokens of prompt and answer together, in each sequence of a preference pair."""

TEXT_LENGTH = 512
"""Maximum tokens of a text that is classified or embedded; longer texts are truncated."""

RATES = {"kto": 5e-6, "simpo": 5e-6, "orpo": 8e-5, "reward": 1e-5, "dpo_full": 5e-7, "embed": 2e-5, "grpo": 1e-6}
"""Learning rates for pages that set none. Adapters by KTO and SimPO: LLaMA-Factory's examples/train_lora,
llama3_lora_kto.yaml and llama3_lora_dpo.yaml (`pref_loss` simpo). Adapters by ORPO, all weights of a reward model, and
all weights by DPO: TRL's examples/scripts/orpo.py and reward_modeling.py, and trl/scripts/dpo.py. Embeddings:
sentence-transformers' examples/sentence_transformer/training/nli/training_nli_v2.py (the Trainer's default is 5e-5).
GRPO: the default of TRL's GRPOConfig."""


def qlora(lora: Recipe, **changes: object) -> Recipe:
    """Adapters on frozen 4-bit weights: for GPUs that cannot hold the bf16 weights; slower than `lora`.

    QLoRA, arXiv:2305.14314. Every size uses ZeRO-2, so every rank holds all weights. `qlora_zero3` is for models that
    are too large for that.
    """
    model = replace(lora.model, quantization="nf4")
    return _changed(lora, changes, model=model, deepspeed="zero2.json")


def qlora_zero3(lora: Recipe, **changes: object) -> Recipe:
    """Return `lora` on frozen 4-bit weights that ZeRO-3 shards during training (`tests/parity/test_quantised.py`).

    Each rank still loads the whole weights before ZeRO-3 shards them: half a byte per weight has to fit on one GPU.
    """
    return qlora(lora, **{"deepspeed": "zero3_adapters.json", **changes})


def dora(lora: Recipe, **changes: object) -> Recipe:
    """Adapters that train each weight's magnitude too, at half the rank: when `lora` falls short of `full`; slower.

    The scale (alpha / rank) is the same. DoRA with half the rank still does better than LoRA (arXiv:2402.09353, the
    results with halved rank).
    """
    assert lora.lora is not None
    adapters = replace(lora.lora, rank=lora.lora.rank // 2, alpha=lora.lora.alpha // 2, dora=True)
    return _changed(lora, changes, lora=adapters)


def full_offload(full: Recipe, **changes: object) -> Recipe:
    """All weights, the optimizer in host memory: when `full` does not fit the GPUs and host memory is plentiful.

    The ZeRO stage is that of `full`.
    """
    stage = "zero2" if full.deepspeed == "zero2.json" else "zero3"
    return _changed(full, changes, deepspeed=f"{stage}_offload.json")


def long_context(full: Recipe, sequence_length: int, global_batch_size: int, **changes: object) -> Recipe:
    """Return `full` on long sequences: under ZeRO-3, with the loss in tiles, so that whole logits never exist."""
    deepspeed = "zero3.json" if full.deepspeed == "zero2.json" else full.deepspeed
    lengths = {"sequence_length": sequence_length, "global_batch_size": global_batch_size}
    return _changed(full, changes, deepspeed=deepspeed, tiled_loss=True, **lengths)


def expert(full: Recipe) -> Recipe:
    """All weights with each layer's experts spread over 8 GPUs (AutoEP): sends tokens instead of weights.

    Two all-to-alls per layer instead of gathering every expert; needs a multiple of `layout.expert` ranks.
    """
    return replace(full, deepspeed="expert_parallel.json", layout=Layout(expert=8))


def dpo(lora: Recipe, *, learning_rate: float, **changes: object) -> Recipe:
    """Return `lora` on preference pairs. TRL's DPO does not pack: each answer is a separate sequence."""
    length = min(DPO_LENGTH, lora.sequence_length)
    pairs = {"method": Dpo(), "data": PREFERENCES, "packing": False, "sequence_length": length}
    return _changed(lora, changes, learning_rate=learning_rate, **pairs)


def kto(lora: Recipe, *, learning_rate: float = RATES["kto"], **changes: object) -> Recipe:
    """Answers judged good or bad (KTO) with adapters: when answers have labels but no pairs; after SFT.

    KTO compares the answers of a micro-batch, so it has at least two.
    """
    least = {
        "sequence_length": min(DPO_LENGTH, lora.sequence_length),
        "micro_batch_size": max(2, lora.micro_batch_size),
    }
    judged = {"method": Kto(), "data": JUDGED, "packing": False, **least}
    return _changed(lora, changes, learning_rate=learning_rate, **judged)


def reward(full: Recipe, *, learning_rate: float = RATES["reward"], **changes: object) -> Recipe:
    """A reward model from preference pairs, all weights: gives each answer a number, to rank or filter answers."""
    length = min(DPO_LENGTH, full.sequence_length)
    pairs = {"method": Reward(), "data": PREFERENCES, "packing": False, "sequence_length": length}
    return _changed(full, changes, learning_rate=learning_rate, **pairs)


def classify(full: Recipe, *, learning_rate: float = RATES["reward"], **changes: object) -> Recipe:
    """A classifier from labelled texts, all weights: gives each text one of the classes in the data."""
    texts = {"method": Classify(), "data": LABELLED, "packing": False, "sequence_length": _of_text(full)}
    return _changed(full, changes, learning_rate=learning_rate, **texts)


def embed(full: Recipe, *, learning_rate: float = RATES["embed"], **changes: object) -> Recipe:
    """Embeddings from pairs of texts that belong together, all weights: for search and to find duplicates.

    The other pairs of the batch are the negatives. The micro-batch is as large as the global batch allows on two ranks,
    up to 16 pairs.
    """
    largest = max(full.micro_batch_size, min(16, full.global_batch_size // 2))
    batch = {"micro_batch_size": largest, "sequence_length": _of_text(full)}
    return _changed(full, changes, learning_rate=learning_rate, method=Embed(), data=MATCHING, packing=False, **batch)


def _of_text(recipe: Recipe) -> int:
    return min(TEXT_LENGTH, recipe.sequence_length)


def orpo(lora: Recipe, *, learning_rate: float = RATES["orpo"], **changes: object) -> Recipe:
    """Preference pairs (ORPO) with adapters: also imitates the better answers, so it needs no SFT first."""
    return _changed(dpo(lora, learning_rate=learning_rate), changes, method=Orpo())


def simpo(lora: Recipe, *, learning_rate: float = RATES["simpo"], **changes: object) -> Recipe:
    """Preference pairs (SimPO) with adapters: like `dpo_lora`, but without a reference model; after SFT."""
    return _changed(dpo(lora, learning_rate=learning_rate), changes, method=Simpo())


def grpo(full: Recipe, *, learning_rate: float = RATES["grpo"], **changes: object) -> Recipe:
    """The model's own answers, scored by a function (GRPO), all weights: when a program can check an answer.

    A step has `global_batch_size` answers of the model.
    """
    own = {"method": Grpo(), "packing": False, "reward": f"{REWARDS}:exact_match"}
    return _changed(full, changes, learning_rate=learning_rate, **own)


def pretrain(full: Recipe, **changes: object) -> Recipe:
    """Continued pre-training on raw text, all weights: to teach a domain or a language before SFT."""
    return _changed(full, changes, method=Pretrain(), data=TEXT)


def distill(full: Recipe, settings: Distill, **changes: object) -> Recipe:
    """Return `full` learning from the output distributions of the teacher in `settings`."""
    return _changed(full, changes, method=settings)


def dpo_lora(lora: Recipe) -> Recipe:
    """Preference pairs (DPO) with adapters: after SFT, with model.path=RUN_FOLDER/export."""
    # alignment-handbook's zephyr-7b-beta/dpo/config_qlora.yaml and LLaMA-Factory's llama3_lora_dpo.yaml, both with a
    # cosine after 10 % of warm-up.
    return dpo(lora, learning_rate=5e-6, schedule=Schedule("cosine", warmup=0.1))


def dpo_full(full: Recipe) -> Recipe:
    """Preference pairs (DPO), all weights: when `dpo_lora` falls short; holds the model twice; after SFT."""
    return dpo(full, learning_rate=RATES["dpo_full"])


class Inherited(NamedTuple):
    """A variant that is the same on every page.

    The first line of the function's docstring says when to choose it: `launch.py --list` prints it.
    """

    start: str
    """The page's variant from which it is derived: `full` or `lora`."""
    change: Callable[[Recipe], Recipe]


INHERITED = {
    "qlora": Inherited("lora", qlora),
    "dora": Inherited("lora", dora),
    "full_offload": Inherited("full", full_offload),
    "expert": Inherited("full", expert),
    "dpo_lora": Inherited("lora", dpo_lora),
    "kto_lora": Inherited("lora", kto),
    "orpo_lora": Inherited("lora", orpo),
    "simpo_lora": Inherited("lora", simpo),
    "dpo_full": Inherited("full", dpo_full),
    "reward": Inherited("full", reward),
    "classify": Inherited("full", classify),
    "embed": Inherited("full", embed),
    "grpo": Inherited("full", grpo),
    "pretrain": Inherited("full", pretrain),
}
"""The variants that a page has without defining them, in the order in which `launch.py --list` shows them."""

NO_IMAGES = "the model reads images, and this variant is not tested with them; use full or lora"
MOE_4_BITS = (
    "transformers keeps all experts of a layer, most of the weights, in one 3-D weight,\n"
    "which bitsandbytes does not pack in 4 bits. Use lora with deepspeed=zero3_moe.json, which shards it over the GPUs"
)
MOE_DORA = "PEFT has no DoRA for a layer's experts, which transformers keeps in one 3-D weight; use lora"
"""Why a vision-language or MoE model does not inherit a variant."""

_CLASSES = "transformers has no sequence classifier of this architecture"
NO_HEADS = {"reward": _CLASSES, "classify": _CLASSES, "embed": "not tested with this architecture"}
"""`WITHOUT` of a page for whose architecture transformers has no sequence classifier."""

_BASE = "a base model without a chat template; dpo_lora is the only method after SFT that it offers"
BASE_MODEL = dict.fromkeys(
    ("kto_lora", "orpo_lora", "simpo_lora", "dpo_full", "reward", "classify", "embed", "grpo"), _BASE
)
"""`WITHOUT` of a page of base models."""


def ruled_out(models: Mapping[str, Model]) -> dict[str, str]:
    """Return the inherited variants that a page's models do not support, each with the reason."""
    reasons: dict[str, str] = {}
    if any("experts" in key for model in models.values() for key in model.config):
        reasons |= {"qlora": MOE_4_BITS, "dora": MOE_DORA}
        if known := {model.config["model_type"] for model in models.values()} & FAMILIES["expert"].keys():
            reasons["expert"] = FAMILIES["expert"][known.pop()]
    else:
        reasons["expert"] = "the model has no experts"
    if any(model.vision for model in models.values()):
        reasons |= {name: NO_IMAGES for name in INHERITED if name != "qlora"}
    return reasons


def _changed(recipe: Recipe, changes: dict[str, Any], **shared: Any) -> Recipe:
    """Return a recipe with the changes that its variant has on every page, overridden by the page's own changes."""
    return replace(recipe, **shared | changes)
