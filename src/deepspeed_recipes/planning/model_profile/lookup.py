"""Looks up models' profiles, and computes and stores those that are missing.

`profiles/` has those of the catalogue's decoders, one file per `model_type`. Other decoders are profiled once
(`meta_device.py`, which imports torch and transformers) and kept in the user's cache. The cache is keyed by the version
of transformers, since versions may compute differently; the shipped profiles are used with any version, or without
transformers.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...recipe import files
from ...recipe.errors import of_system
from ...recipe.files import Json, JsonView
from ...recipe.overrides import say_once
from ...recipe.project import require
from ...recipe.recipe import Lora
from .profile import LayerProfile, ModelProfile, SavedBytes, training_mode

PROFILES = Path(__file__).parent / "profiles"
PROFILER = ("profile.py", "meta_device.py", "allocations.py")
"""The code that profiles models, a change of which invalidates the cache."""


def profile_of(config: JsonView, lora: Lora | None = None) -> ModelProfile:
    """Return a decoder's profile for training all weights or, if `lora` is given, such adapters, of any rank.

    It takes milliseconds for models of the catalogue, and seconds (mostly imports) the first time for others. Of a
    `config.json`, `model_type` and the dimensions are enough.

    Raises:
        UserError: transformers has no such decoder, the decoder cannot have these adapters, or it has no profile yet
            and torch or transformers is not installed.
    """
    mode, stored = training_mode(lora), shipped(config)
    if not any(mode in profile.saved_outside_layers for profile in stored):
        code = b"".join(Path(__file__).with_name(name).read_bytes() for name in PROFILER)
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepspeed-recipes" / "profiles"
        cached = folder / f"{key(config)} {hashlib.sha256(code + mode.encode()).hexdigest()[:8]}.json"
        stored = list(read(cached).values())
    for profile in stored:
        if mode in profile.saved_outside_layers:
            return profile
    require("transformers")
    from .meta_device import profile_model

    profile = profile_model(config, [None, lora] if lora else [None])
    try:
        files.write_text(cached, text({key(config): profile}))
    except OSError as error:  # everything is computed again each time
        say_once(f"not kept for the next time: {of_system(error)}")
    return profile


def shipped(config: JsonView) -> list[ModelProfile]:
    """Return the profiles of this model in `profiles/`: at most one, computed with any version of transformers."""
    profiles = read(PROFILES / f"{config.get('model_type')}.json")
    return [profile for name, profile in profiles.items() if name.endswith(f" {digest(config)}")]


def key(config: JsonView) -> str:
    """Return the key of a stored profile: the version of transformers, or `any` without it, and a digest."""
    from importlib.metadata import PackageNotFoundError, version  # 30 ms, which shipped profiles need not wait for

    try:
        return f"{version('transformers')} {digest(config)}"
    except PackageNotFoundError:
        return f"any {digest(config)}"


def digest(config: JsonView) -> str:
    """Return a digest of a configuration."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=dict).encode()).hexdigest()[:16]


def read(file: Path) -> dict[str, ModelProfile]:
    """Return the profiles in a file by key; none if the file does not exist or has an older format."""
    try:
        return dict(_parsed(file, file.stat().st_mtime_ns))
    except (OSError, ValueError, TypeError, KeyError):
        return {}


@lru_cache(maxsize=64)
def _parsed(file: Path, written: int) -> dict[str, ModelProfile]:
    """Return the profiles in a file, cached by its time of change: a search reads the same file hundreds of times."""
    stored = json.loads(file.read_text(encoding="utf-8"))
    return {name: from_dict(values) for name, values in stored.items()}


def text(profiles: Mapping[str, ModelProfile]) -> str:
    """Return the content of a file of profiles by key."""
    lines = (f"{json.dumps(name)}: {json.dumps(to_dict(one))}" for name, one in profiles.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def to_dict(profile: ModelProfile) -> Json:
    """Return the profile in plain JSON types, with a list of three numbers for each `SavedBytes`."""

    def number(value: float) -> float:
        """Return a number without the meaningless digits that solving the equations leaves."""
        short = round(value, 6)
        return int(short) if short == int(short) else short

    def plain(items: list[tuple[str, Any]]) -> Any:
        values = dict(items)
        is_saved_bytes = set(values) == {"per_token", "per_pair", "fixed"}
        return [number(value) for value in values.values()] if is_saved_bytes else values

    return asdict(profile, dict_factory=plain)


def from_dict(values: JsonView) -> ModelProfile:
    """Return the profile from the result of `to_dict`."""

    def modes(owner: JsonView, *fields: str) -> dict[str, dict[str, SavedBytes]]:
        return {field: {mode: SavedBytes(*numbers) for mode, numbers in owner[field].items()} for field in fields}

    kinds = (
        LayerProfile(**kind | modes(kind, "saved", "backward_peak") | {"linears": tuple(map(tuple, kind["linears"]))})
        for kind in values["layer_kinds"]
    )
    rest = {"layer_kinds": tuple(kinds), "layer_order": tuple(values["layer_order"])}
    return ModelProfile(**dict(values) | modes(values, "saved_outside_layers", "loss_peak") | rest)
