"""The recipe that a model without a page borrows: of the nearest architecture and size, by the planner's profiles."""

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
"""What the names of a configuration's dimensions begin with, or hold, where layers mix tokens otherwise than by
attention: their adapters have names of their own, and documents cannot be packed."""
FAR = 10
"""Times as many parameters, or as few, from which on size says more about a model's settings than architecture."""


def nearest(config: Mapping[str, Any], variant: str) -> Recipe:
    """Return the page's recipe that suits a model best.

    A mixture of experts borrows from mixtures only, and others never do, since adapters and layouts name the experts;
    what models that see are trained with is borrowed by none.
    Then count, in this order: a size within ten times the model's, its `model_type`, the same mixers beside attention
    (state-space layers, linear attention, convolutions, or none), and the nearest size.

    Args:
        config: a decoder's, as in a `config.json`.
        variant: of the page.

    Raises:
        UserError: no page of such a model has the variant.
    """
    own = profile_of(config)
    modules = [pages.page(family) for family in pages.families() if family != "tiny"]  # its rates suit it alone
    modules = [module for module in modules if not _sees(module)]
    alike = [module for module in modules if _is_mixture(_first_profile(module)) == _is_mixture(own)]
    recipes = [
        pages.build(module, size, variant)
        for module in alike
        if variant in pages.variants(module)
        for size in module.SIZES
    ]
    if not recipes:
        known = dict.fromkeys(name for module in alike for name in pages.variants(module))
        kind = "mixture of experts" if _is_mixture(own) else "decoder"
        raise UserError(f"{variant}: no page of a {kind} has this variant; there are: {', '.join(known)}.")
    return min(recipes, key=lambda recipe: _distance(recipe.model.config, config))


def _sees(module: ModuleType) -> bool:
    return any(model.vision for model in module.SIZES.values())


def _first_profile(module: ModuleType) -> ModelProfile:
    return profile_of(next(iter(module.SIZES.values())).config)


def _is_mixture(profile: ModelProfile) -> bool:
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
