"""What variants of the same name share on every page, said once.

Each function takes a recipe and returns it changed. A page passes what is particular to its family, and any other field
that differs there: `variants.dpo(lora(size), learning_rate=5e-6, global_batch_size=32)`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .methods.settings import Distill
from .recipe import Recipe
from .samples import JUDGED, LABELLED, MATCHING, PREFERENCES, REWARDS, TEXT

ATTENTION = "q_proj,k_proj,v_proj,o_proj"
EXPERTS = "mlp.experts.gate_up_proj,mlp.experts.down_proj"
"""`Lora.target_modules` and `Lora.target_parameters` of a mixture of experts. transformers fuses a layer's experts into
3-D weights, which are not linear layers, so `all-linear` would miss them. The router stays frozen."""
DPO_LENGTH = 2048
"""Tokens of prompt and answer together, in each sequence of a preference pair."""

TEXT_LENGTH = 512
"""Tokens of a text that is classified or embedded; longer ones are cut."""

RATES = {"kto": 5e-6, "simpo": 5e-6, "orpo": 8e-5, "reward": 1e-5, "dpo_full": 5e-7, "embed": 2e-5, "grpo": 1e-6}
"""Learning rates where a page has none of its own. Adapters by KTO and SimPO: LLaMA-Factory's examples/train_lora,
llama3_lora_kto.yaml and llama3_lora_dpo.yaml (`pref_loss` simpo). Adapters by ORPO, all weights of a reward model, and
all weights by DPO: TRL's examples/scripts/orpo.py and reward_modeling.py, and trl/scripts/dpo.py. Embeddings:
sentence-transformers' examples/sentence_transformer/training/nli/training_nli_v2.py (the Trainer's default is 5e-5).
GRPO: the default of TRL's GRPOConfig."""
Variant = Callable[[str], Recipe]
"""A function of a page: the recipe of a size."""


def qlora(lora: Recipe, **changes: Any) -> Recipe:
    """Return `lora` on frozen 4-bit weights (QLoRA, arXiv:2305.14314).

    With ZeRO-2 at every size: every rank holds all of them. `qlora_zero3` is for those that are too large.
    """
    model = replace(lora.model, quantization="nf4")
    return _changed(lora, changes, model=model, deepspeed="zero2.json")


def qlora_zero3(lora: Recipe, **changes: Any) -> Recipe:
    """Return `lora` on frozen 4-bit weights that the ranks share while they train (`tests/parity/test_quantised.py`).

    Each rank still loads them whole before ZeRO-3 shards them: half a byte per weight has to fit on one GPU.
    """
    return qlora(lora, **{"deepspeed": "zero3_adapters.json", **changes})


def dora(lora: Recipe, **changes: Any) -> Recipe:
    """Return `lora` with the weights' magnitudes trained too, at half the rank and the same scale (alpha / rank).

    Half the rank is enough to do better than LoRA: arXiv:2402.09353, the rows of DoRA with halved rank.
    """
    assert lora.lora is not None
    adapters = replace(lora.lora, rank=lora.lora.rank // 2, alpha=lora.lora.alpha // 2, dora=True)
    return _changed(lora, changes, lora=adapters)


def full_offload(full: Recipe, **changes: Any) -> Recipe:
    """Return `full` with the optimizer in host memory, at its ZeRO stage."""
    stage = "zero2" if full.deepspeed == "zero2.json" else "zero3"
    return _changed(full, changes, deepspeed=f"{stage}_offload.json")


def long_context(full: Recipe, sequence_length: int, global_batch_size: int, **changes: Any) -> Recipe:
    """Return `full` on long sequences: under ZeRO-3, with the loss in tiles, so that whole logits never exist."""
    deepspeed = "zero3.json" if full.deepspeed == "zero2.json" else full.deepspeed
    lengths = {"sequence_length": sequence_length, "global_batch_size": global_batch_size}
    return _changed(full, changes, deepspeed=deepspeed, tiled_loss=True, **lengths)


def dpo(lora: Recipe, *, learning_rate: float, **changes: Any) -> Recipe:
    """Return `lora` on preference pairs. TRL's DPO does not pack: each answer is a sequence of its own."""
    length = min(DPO_LENGTH, lora.sequence_length)
    pairs = {"method": "dpo", "data": PREFERENCES, "packing": False, "sequence_length": length}
    return _changed(lora, changes, learning_rate=learning_rate, **pairs)


def kto(lora: Recipe, *, learning_rate: float = RATES["kto"], **changes: Any) -> Recipe:
    """Return `lora` on judged answers; KTO compares those of a micro-batch, so there are at least two."""
    least = {
        "sequence_length": min(DPO_LENGTH, lora.sequence_length),
        "micro_batch_size": max(2, lora.micro_batch_size),
    }
    judged = {"method": "kto", "data": JUDGED, "packing": False, **least}
    return _changed(lora, changes, learning_rate=learning_rate, **judged)


def reward(full: Recipe, *, learning_rate: float = RATES["reward"], **changes: Any) -> Recipe:
    """Return `full` on preference pairs as a reward model: a number for each answer instead of text."""
    length = min(DPO_LENGTH, full.sequence_length)
    pairs = {"method": "reward", "data": PREFERENCES, "packing": False, "sequence_length": length}
    return _changed(full, changes, learning_rate=learning_rate, **pairs)


def classify(full: Recipe, *, learning_rate: float = RATES["reward"], **changes: Any) -> Recipe:
    """Return `full` on labelled texts as a classifier."""
    texts = {"method": "classify", "data": LABELLED, "packing": False, "sequence_length": _of_text(full)}
    return _changed(full, changes, learning_rate=learning_rate, **texts)


def embed(full: Recipe, *, learning_rate: float = RATES["embed"], **changes: Any) -> Recipe:
    """Return `full` on matching texts as a model that embeds: other pairs of the batch are what it learns from.

    The micro-batch is as large as the global batch allows on two ranks, up to 16 pairs.
    """
    largest = max(full.micro_batch_size, min(16, full.global_batch_size // 2))
    batch = {"micro_batch_size": largest, "sequence_length": _of_text(full)}
    return _changed(full, changes, learning_rate=learning_rate, method="embed", data=MATCHING, packing=False, **batch)


def _of_text(recipe: Recipe) -> int:
    return min(TEXT_LENGTH, recipe.sequence_length)


def orpo(lora: Recipe, *, learning_rate: float = RATES["orpo"], **changes: Any) -> Recipe:
    """Return `lora` on preference pairs by ORPO, which imitates the better answers too: from a base model on."""
    return _changed(dpo(lora, learning_rate=learning_rate), changes, method="orpo")


def simpo(lora: Recipe, *, learning_rate: float = RATES["simpo"], **changes: Any) -> Recipe:
    """Return `lora` on preference pairs by SimPO."""
    return _changed(dpo(lora, learning_rate=learning_rate), changes, method="simpo")


def grpo(full: Recipe, *, learning_rate: float = RATES["grpo"], **changes: Any) -> Recipe:
    """Return `full` on prompts: the model's own answers, scored by functions, as many as `global_batch_size` says."""
    own = {"method": "grpo", "packing": False, "reward": f"{REWARDS}:exact_match"}
    return _changed(full, changes, learning_rate=learning_rate, **own)


def pretrain(full: Recipe, **changes: Any) -> Recipe:
    """Return `full` on raw text."""
    return _changed(full, changes, method="pretrain", data=TEXT)


def distill(full: Recipe, settings: Distill, **changes: Any) -> Recipe:
    """Return `full` learning from the distributions of the teacher that `settings` name."""
    return _changed(full, changes, method="distill", distill=settings)


def feedback(lora: Variant) -> tuple[Variant, ...]:
    """Return `kto_lora`, `orpo_lora` and `simpo_lora` of a page, which are alike on all of them."""
    about = {
        kto: "Answers judged good or bad (KTO) with adapters: when there are labels and no pairs; after SFT.",
        orpo: "Preference pairs (ORPO) with adapters: imitates the better answers too, so it needs no SFT before it.",
        simpo: "Preference pairs (SimPO) with adapters: as `dpo_lora`, but no reference model is computed; after SFT.",
    }
    return tuple(_of_page(lora, f"{change.__name__}_lora", change, about[change]) for change in about)


def dpo_full_of(full: Variant) -> Variant:
    """Return `dpo_full` of a page, which is alike on all of them."""
    about = "Preference pairs (DPO), all weights: when `dpo_lora` falls short; holds the model twice; after SFT."
    return _of_page(full, "dpo_full", _dpo_full, about)


def _dpo_full(full: Recipe) -> Recipe:
    return dpo(full, learning_rate=RATES["dpo_full"])


def heads(full: Variant) -> tuple[Variant, ...]:
    """Return `reward`, `classify` and `embed` of a page, which are alike on all of them."""
    about = {
        reward: "A reward model from preference pairs, all weights: rates an answer by a number, to rank or filter.",
        classify: "A classifier from labelled texts, all weights: gives a text one of the classes that the data has.",
        embed: "Embeddings from pairs of texts that belong together, all weights: to search and to find duplicates.",
    }
    return tuple(_of_page(full, change.__name__, change, about[change]) for change in about)


def grpo_of(full: Variant) -> Variant:
    """Return `grpo` of a page, which is alike on all of them."""
    about = "Its own answers, scored by a function (GRPO), all weights: for what a program can tell right from wrong."
    return _of_page(full, "grpo", grpo, about)


def _of_page(start: Variant, name: str, change: Callable[[Recipe], Recipe], about: str) -> Variant:
    """Return a function like those that a page defines: `ds-recipes launch --list` prints `about`."""

    def variant(size: str) -> Recipe:
        return change(start(size))

    variant.__module__, variant.__name__, variant.__qualname__, variant.__doc__ = start.__module__, name, name, about
    return variant


def _changed(recipe: Recipe, changes: dict[str, Any], **shared: Any) -> Recipe:
    """Return a recipe with what its variant shares on every page, and with a page's own changes, which win."""
    return replace(recipe, **shared | changes)
