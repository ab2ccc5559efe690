"""Creates the recipe's optimizer if it is not the Trainer's own."""

import importlib.util
from collections.abc import Collection
from typing import Any

import torch

from ...recipe.errors import UserError
from ...recipe.recipe import Recipe
from . import muon, rates


def needed(recipe: Recipe) -> bool:
    """Return whether the recipe needs something other than the Trainer's AdamW with one rate for all weights."""
    return recipe.optimizer != "adamw" or rates.apart(recipe)


def check(recipe: Recipe) -> None:
    """Refuse an optimizer that is not installed, before anything is loaded.

    Raises:
        UserError: the message names the package.
    """
    if recipe.optimizer == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError("optimizer=adamw_8bit: bitsandbytes is not installed; pip install bitsandbytes.")


def make(recipe: Recipe, model: torch.nn.Module, kind: Any, decayed: Collection[str], options: dict[str, Any]) -> Any:
    """Return the optimizer.

    Args:
        recipe: names the optimizer, and sets the rates of the weights.
        model: whose weights it updates.
        kind: the class that the Trainer would use.
        decayed: names of the weights that are decayed.
        options: AdamW's, including `lr`.
    """
    named = dict(model.named_parameters())
    shares = rates.shares(recipe, named)
    trained = {name: weight for name, weight in named.items() if weight.requires_grad}
    groups = [
        {"params": [weight for name, weight in trained.items() if (name in decayed) == decays], "weight_decay": decay}
        for decays, decay in ((True, recipe.weight_decay), (False, 0.0))
    ]
    parts = rates.split(groups, options["lr"], {weight: shares[name] for name, weight in trained.items()})
    if recipe.optimizer == "muon":
        return muon.optimizer(model, parts, **options)
    if recipe.optimizer == "adamw_8bit":
        return eight_bit()(parts, **{name: options[name] for name in ("lr", "betas", "eps")})
    return kind(parts, **options)


def eight_bit() -> Any:
    """Return bitsandbytes' AdamW with moments in 8 bits.

    The Trainer's own option keeps embeddings' moments in 32 bits, and finds these only without ZeRO.
    """
    from bitsandbytes.optim import AdamW8bit  # 45 MB per rank, so only where it is used

    return AdamW8bit
