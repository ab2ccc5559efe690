"""Profiles the catalogue's decoders for the planner: `python -m scripts.maintain.calibration.shipped_profiles`."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from deepspeed_recipes.planning.model_profile.lookup import PROFILES, key, read, text
from deepspeed_recipes.planning.model_profile.profile import ModelProfile, training_mode
from deepspeed_recipes.recipe import files, pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.recipe import Lora

USUAL_ADAPTERS = (Lora(), Lora(dropout=0.05), Lora(dora=True))
"""Adapters to profile for every model of the catalogue that can have them, in addition to those of the pages."""


def catalogue() -> Iterator[tuple[str, Mapping[str, Any], list[Lora]]]:
    """Yield the name, the configuration and the adapters to profile for every size of every page."""
    for family in pages.families():
        module = pages.page(family)
        for size, model in module.SIZES.items():
            own = [pages.build(module, size, variant).lora for variant in pages.variants(module)]
            loras = {training_mode(lora): lora for lora in (*USUAL_ADAPTERS, *own) if lora}
            yield f"{family}-{size}", model.config, list(loras.values())


def compute_profile(config: Mapping[str, Any], loras: Sequence[Lora]) -> ModelProfile:
    """Return a model's profile for all weights and for those of `loras` that the model can have."""
    from deepspeed_recipes.planning.model_profile.meta_device import profile_model

    profile = profile_model(config)
    for lora in loras:
        try:
            profile = merged(profile, profile_model(config, [lora]))
        except UserError:
            continue  # adapters on fused experts have neither dropout nor magnitudes
    return profile


def merged(one: ModelProfile, other: ModelProfile) -> ModelProfile:
    """Return a model's profile with the training modes of both profiles."""

    def both(mine: Any, theirs: Any, *fields: str) -> Any:
        return replace(mine, **{field: {**getattr(mine, field), **getattr(theirs, field)} for field in fields})

    kinds = zip(one.layer_kinds, other.layer_kinds, strict=True)
    layers = tuple(both(*pair, "adapter_parameters", "saved", "backward_peak") for pair in kinds)
    outside: ModelProfile = both(one, other, "saved_outside_layers", "loss_peak")
    return replace(outside, layer_kinds=layers)


def main(arguments: Sequence[str] = ()) -> None:
    """Profile the models that `profiles/` lacks (with `--again`, all models), and delete those no longer in use."""
    found: dict[str, dict[str, ModelProfile]] = {}
    for name, config, loras in catalogue():
        known = None if "--again" in arguments else read(PROFILES / f"{config['model_type']}.json").get(key(config))
        start = time.perf_counter()
        found.setdefault(config["model_type"], {})[key(config)] = known or compute_profile(config, loras)
        if not known:
            print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    for old in PROFILES.glob("*.json"):
        old.unlink()
    for model_type, profiles in found.items():
        files.write_text(PROFILES / f"{model_type}.json", text(profiles))


if __name__ == "__main__":
    main(sys.argv[1:])
