"""The model's own weights that `train`, `freeze` and `lora.modules_to_save` choose to be trained, by their names."""

import json
from functools import lru_cache

from ...recipe import limits
from ...recipe.errors import UserError
from ...recipe.recipe import Recipe, names


def check(recipe: Recipe) -> None:
    """Refuse names that the model does not have, if its dimensions are known; raises UserError."""
    share(recipe)
    saved(recipe)


def share(recipe: Recipe) -> float:
    """Return the share of the parameters that is trained in a recipe without adapters.

    Raises:
        UserError: an expression matches no weight or all of them.
    """
    if not recipe.trains_some or not recipe.model.config:
        return 1.0
    return limits.trained_share(recipe, _counts(recipe))


def saved(recipe: Recipe) -> int:
    """Return the number of parameters of the modules that `lora.modules_to_save` trains whole.

    Raises:
        UserError: the model has no such module.
    """
    chosen = names(recipe.lora.modules_to_save if recipe.lora else None)
    if not chosen or not recipe.model.config or recipe.method.headless:
        return 0
    counts = _counts(recipe)
    text = recipe.model.config.get("text_config") or recipe.model.config
    found = {name: {one for one in counts if f".{name}." in f".{one}"} for name in chosen}
    for name, weights in found.items():
        if name == "lm_head" and text.get("tie_word_embeddings"):
            weights.add(next(iter(counts)))  # the embeddings come first
        if not weights:
            raise UserError(f"lora.modules_to_save={','.join(chosen)}: the model has no module {name}.")
    return sum(counts[one] for one in set().union(*found.values()))


def _counts(recipe: Recipe) -> dict[str, int]:
    return _counts_of(json.dumps(dict(recipe.model.config), sort_keys=True))


@lru_cache
def _counts_of(config: str) -> dict[str, int]:
    from . import meta_device  # imports torch, and only these recipes need it

    return {name: weight.numel() for name, weight in meta_device.build(json.loads(config)).named_parameters()}
