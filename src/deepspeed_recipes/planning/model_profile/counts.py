"""Counts the parameters of a run's teacher, of new rows, and those that a run trains by `train`, `freeze` and LoRA."""

import json
from collections.abc import Collection
from functools import lru_cache
from math import prod
from pathlib import Path

from ...recipe import limits, new_tokens, pages
from ...recipe.errors import UserError
from ...recipe.files import text_of
from ...recipe.methods import Distill
from ...recipe.recipe import Recipe, names
from .profile import further_token_ends


def teacher_parameters(recipe: Recipe) -> int:
    """Return the number of parameters of the teacher that is held during training.

    0 if there is none, or if the number is unknown, as for a model on the Hub without a page.
    """
    method = recipe.method
    if not isinstance(method, Distill) or not method.teacher or method.top_k is not None:  # top_k frees it early
        return 0
    found = 0
    for file in Path(method.teacher).glob("*.safetensors"):
        with file.open("rb") as opened:  # a JSON header follows its length in 8 bytes
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        found += sum(prod(about["shape"]) for name, about in header.items() if name != "__metadata__")
    models = (model for family in pages.families() for model in pages.page(family).SIZES.values())
    return found or next((model.parameters for model in models if model.path == method.teacher), 0)


def check_trained(recipe: Recipe, given: Collection[str] = ()) -> None:
    """Refuse names that the model does not have, if its dimensions are known.

    `lora.target_modules` and `lora.target_parameters` are checked if the user has `given` them: building the model
    takes seconds.
    """
    trained_share(recipe)
    saved_parameters(recipe)
    if not (lora := recipe.lora) or not recipe.model.config or recipe.model.vision:
        return
    for key, text in (("modules", lora.target_modules), ("parameters", lora.target_parameters)):
        if f"lora.target_{key}" not in given or text in (None, "all-linear"):
            continue
        known = {name if key == "parameters" else name.rpartition(".")[0] for name in _counts(recipe)}
        for target in names(text):
            if not any(f".{name}".endswith(f".{target}") for name in known):
                ends = sorted({name.rpartition(".")[2] for name in known if "norm" not in name})
                raise UserError(
                    f"lora.target_{key}={text}: the model has no {key[:-1]} {target}; it has {', '.join(ends)}."
                )


def trained_share(recipe: Recipe) -> float:
    """Return the share of the parameters that is trained in a recipe without adapters."""
    if not recipe.trains_some or not recipe.model.config:
        return 1.0
    return limits.trained_share(recipe, _counts(recipe))


def saved_parameters(recipe: Recipe) -> int:
    """Return the number of parameters trained with adapters: new rows, `lora.modules_to_save`, `model.train_mtp`."""
    chosen = names(recipe.lora.modules_to_save if recipe.lora else None)
    text = text_of(recipe.model.config)
    tokens = len(new_tokens.read(recipe.model.new_tokens)) if recipe.lora else 0
    ends = 1 if text.get("tie_word_embeddings") or recipe.method.headless else 2
    rows = ends * tokens * (text.get("hidden_size") or text.get("n_embd") or 0)
    if recipe.lora and recipe.model.train_mtp and recipe.model.config:
        last = f".layers.{text['num_hidden_layers'] - 1}."
        rows += sum(count for name, count in _counts(recipe).items() if last in name)
        rows += further_token_ends(text["hidden_size"])
    if not chosen or not recipe.model.config or recipe.method.headless:
        return rows
    counts = _counts(recipe)
    found = {name: {one for one in counts if f".{name}." in f".{one}"} for name in chosen}
    for name, weights in found.items():
        if name == "lm_head" and text.get("tie_word_embeddings"):
            weights.add(next(iter(counts)))  # the embeddings come first
        if not weights:
            raise UserError(f"lora.modules_to_save={','.join(chosen)}: the model has no module {name}.")
    return rows + sum(counts[one] for one in set().union(*found.values()))


def _counts(recipe: Recipe) -> dict[str, int]:
    return _counts_of(json.dumps(dict(recipe.model.config), sort_keys=True))


@lru_cache
def _counts_of(config: str) -> dict[str, int]:
    from . import meta_device  # imports torch, and only these recipes need it

    return {name: weight.numel() for name, weight in meta_device.build(json.loads(config)).named_parameters()}
