"""Looks up models' profiles, and computes and stores those that are missing.

`profiles/` has those of the catalogue's decoders, one file per `model_type`. Other decoders are profiled once
(`meta_device.py`, which imports torch and transformers) and kept in the user's cache. The cache is keyed by the version
of transformers, since versions may compute differently; the shipped profiles are used with any version, or without
transformers.
"""

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...recipe import files
from ...recipe.errors import of_system
from ...recipe.files import Json, JsonView
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
        cached = cache() / f"{key(config)} {hashlib.sha256(code).hexdigest()[:8]}.json"
        stored += read(cached).values()
    for profile in stored:
        if mode in profile.saved_outside_layers:
            return profile
    require("transformers")
    from .meta_device import profile_model

    # Every stored profile has the mode `full`.
    profile = profile_model(config, [lora] if stored else [None, lora] if lora else [None])
    for other in stored:
        profile = merged(profile, other)
    _store(cached, text({key(config): profile}))
    return profile


def tower_parameters(config: JsonView) -> int:
    """Return the number of parameters of a vision-language model outside its decoder and head, or 0 without a tower.

    Counting takes seconds the first time; `config` is the whole `config.json`.
    """
    if not config.get("vision_config"):
        return 0
    cached = cache() / f"{key(config)} tower.json"
    if cached.exists():
        return int(json.loads(cached.read_text(encoding="utf-8")))
    require("transformers")
    from .meta_device import tower_parameters as counted

    found = counted(config)
    _store(cached, json.dumps(found))
    return found


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


def cache() -> Path:
    """Return the folder with the profiles of models outside the catalogue."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepspeed-recipes" / "profiles"


def merged(one: ModelProfile, other: ModelProfile) -> ModelProfile:
    """Return a model's profile with the training modes of both profiles."""

    def both(mine: Any, theirs: Any, *fields: str) -> Any:
        return replace(mine, **{field: {**getattr(mine, field), **getattr(theirs, field)} for field in fields})

    kinds = zip(one.layer_kinds, other.layer_kinds, strict=True)
    layers = tuple(both(*pair, "adapter_parameters", "saved", "backward_peak") for pair in kinds)
    outside: ModelProfile = both(one, other, "saved_outside_layers", "loss_peak")
    return replace(outside, layer_kinds=layers)


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


def _store(file: Path, text: str) -> None:
    """Write to the cache; if it cannot be written, everything is computed again each time."""
    try:
        files.write_text(file, text)
    except OSError as error:
        _say_once(f"not kept for the next time: {of_system(error)}")


@lru_cache
def _say_once(line: str) -> None:
    print(line, file=sys.stderr)


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
