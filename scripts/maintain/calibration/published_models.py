"""Dimensions and profiles of the models in published tables; `python -m ...published_models` profiles new models.

Models of the catalogue are named by recipe and size. The dimensions of others are in `published_models.json`. Their
profiles, and those for adapters that no page has, are in `published_profiles.json`, so that a report takes seconds and
needs neither torch nor a network.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from deepspeed_recipes.planning.model_profile import lookup
from deepspeed_recipes.planning.model_profile.profile import ModelProfile, training_mode
from deepspeed_recipes.recipe import files, pages
from deepspeed_recipes.recipe.recipe import Lora

from . import MEASUREMENTS
from .published_rows import PublishedRow, published_rows, questions
from .shipped_profiles import compute_profile, merged

MODELS = MEASUREMENTS / "published_models.json"
PROFILES = MEASUREMENTS / "published_profiles.json"


@cache
def config_of(model: str) -> Mapping[str, Any]:
    """Return the configuration of a model given as a Hub id or as `recipe-size`.

    Raises:
        KeyError: the model is unknown.
    """
    others: dict[str, dict[str, Any]] = json.loads(MODELS.read_text(encoding="utf-8"))
    if model in others:
        return others[model]
    family, _, size = model.partition("-")
    return pages.page(family).SIZES[size].config


@cache
def _stored() -> Mapping[str, ModelProfile]:
    return lookup.read(PROFILES)


def profile_of(row: PublishedRow) -> ModelProfile:
    """Return the profile of a row's model with the row's adapters, computed if it is not stored."""
    for profile in _profiles(row.model):
        if training_mode(row.lora) in profile.saved_outside_layers:
            return profile
    return lookup.profile_of(config_of(row.model), row.lora)


@cache
def _profiles(model: str) -> list[ModelProfile]:
    config = config_of(model)
    stored = _stored().get(lookup.digest(config))
    return lookup.shipped(config) + ([stored] if stored else [])


def missing(rows: Iterable[PublishedRow]) -> dict[str, list[Lora]]:
    """Return the adapters without a profile by model; an empty list if only full training lacks one."""
    found: dict[str, dict[str, Lora]] = {}
    for row in rows:
        if row.why_memory_is_not_planned and row.why_time_is_not_planned:
            continue
        mode = training_mode(row.lora)
        if any(mode in profile.saved_outside_layers for profile in _profiles(row.model)):
            continue
        adapters = found.setdefault(row.model, {})
        if row.lora:
            adapters[mode] = row.lora
    return {model: list(adapters.values()) for model, adapters in found.items()}


def main(arguments: Sequence[str] = ()) -> None:
    """Profile the missing models, or with `--again` all of them, which takes seconds per model."""
    if "--again" in arguments:
        files.write_text(PROFILES, "{}\n")
    profiles = dict(_stored())
    for model, adapters in missing([*published_rows(), *questions()]).items():
        config = config_of(model)
        digest = lookup.digest(config)
        new = compute_profile(config, adapters)
        profiles[digest] = merged(new, profiles[digest]) if digest in profiles else new
        print(model, *map(training_mode, adapters), flush=True)
    files.write_text(PROFILES, lookup.text(dict(sorted(profiles.items()))))


if __name__ == "__main__":
    main(sys.argv[1:])
