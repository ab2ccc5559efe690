"""Finds the page's recipe that a model without a page borrows, by architecture and size."""

import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ...recipe import pages
from ...recipe.errors import UserError
from ...recipe.recipe import Recipe
from ..model_profile.lookup import profile_of
from ..model_profile.profile import ModelProfile

MIXERS = ("mamba", "linear_", "conv_L")
"""Parts of the configuration keys of models whose layers mix tokens by other means than attention. Adapters of such
layers have names of their own, and documents cannot be packed."""
FAR = 10
"""Factor between two models' parameters above which size determines the settings more than architecture does."""


def nearest(config: Mapping[str, Any], variant: str) -> Recipe:
    """Return the page's recipe that suits a model best.

    MoE models borrow from MoE pages only, and dense models from dense pages, because adapters and layouts name the
    experts. Pages of vision-language models are never borrowed from. The criteria, in order of priority: a size within
    a factor of ten, the same `model_type`, the same mixers besides attention (state-space layers, linear attention,
    convolutions, or none), the nearest size.

    Args:
        config: the decoder's configuration, as in a `config.json`.
        variant: the page's variant to return.

    Raises:
        UserError: no page of this kind of model has the variant.
    """
    own = profile_of(config)
    modules = [pages.page(family) for family in pages.families() if family != "tiny"]  # its rates suit it alone
    modules = [module for module in modules if not _has_vision(module)]
    alike = [module for module in modules if _is_moe(_first_profile(module)) == _is_moe(own)]
    recipes = [
        pages.build(module, size, variant)
        for module in alike
        if variant in pages.variants(module)
        for size in module.SIZES
    ]
    if not recipes:
        known = dict.fromkeys(name for module in alike for name in pages.variants(module))
        kind = "mixture of experts" if _is_moe(own) else "decoder"
        raise UserError(f"{variant}: no page of a {kind} has this variant; choose from: {', '.join(known)}.")
    return min(recipes, key=lambda recipe: _distance(recipe.model.config, config))


def _has_vision(module: ModuleType) -> bool:
    return any(model.vision for model in module.SIZES.values())


def _first_profile(module: ModuleType) -> ModelProfile:
    return profile_of(next(iter(module.SIZES.values())).config)


def _is_moe(profile: ModelProfile) -> bool:
    return any(kind.experts_per_token for kind in profile.layer_kinds)


def _has_linear_attention(profile: ModelProfile) -> bool:
    return any(not kind.attention_width for kind in profile.layer_kinds)


def _mixers(config: Mapping[str, Any]) -> set[str]:
    return {mixer for mixer in MIXERS if any(mixer in name for name in config)}


def _distance(theirs: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[bool, bool, bool, bool, float]:
    one, other = profile_of(theirs), profile_of(own)
    size = abs(math.log(one.parameters / other.parameters))
    linear = _has_linear_attention(one) != _has_linear_attention(other)
    mixers = _mixers(theirs) != _mixers(own)
    return size > math.log(FAR), one.model_type != other.model_type, mixers, linear, size
