"""Converts a recipe to the plain types of `recipe.json` and back, and its adapters to PEFT's arguments."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any

from . import bounds
from .bounds import shown
from .errors import UserError
from .files import Json, JsonView
from .methods import METHODS, Method
from .recipe import Lora, Recipe, names

hints_of = cache(typing.get_type_hints)
"""Returns a dataclass's types by field. Without the cache this call takes most of the time of an override."""


def to_dict(recipe: Recipe) -> Json:
    """Return the recipe as plain JSON types, as in a run folder's `recipe.json`."""
    values: Json = {}
    for name, value in dataclasses.asdict(recipe).items():
        if name == "method":
            values |= {name: recipe.method.name, **({recipe.method.name: value} if value else {})}
        else:
            values[name] = value
    return values


def from_dict(values: JsonView, kind: type = Recipe) -> Any:
    """Rebuild a recipe from the result of `to_dict`."""
    if not isinstance(values, Mapping):
        raise UserError(f"recipe.json: {kind.__name__} is {shown(values)}; it has to be an object with keys.")
    if kind is Recipe:
        name = values.get("method", "sft")
        if not isinstance(name, str) or name not in METHODS:
            raise UserError(f"method={shown(name)}: must be one of {', '.join(METHODS)}.")
        # Older versions wrote the sections of all other methods, too.
        sections = {key: from_dict(values[key], method) for key, method in SECTIONS.items() if key in values}
        for key, section in sections.items():
            bounds.check(section, f"{key}.")
        rest = {key: value for key, value in values.items() if key not in SECTIONS}
        values = {**rest, "method": sections.get(name) or METHODS[name]()}
    hints = hints_of(kind)
    unknown = sorted(set(values) - {field.name for field in dataclasses.fields(kind)})
    if unknown:
        raise UserError(f"recipe.json: unknown field {unknown[0]!r} in {kind.__name__}; written by another version?")
    rebuilt = dict(values)
    for key, value in values.items():
        nested = dataclass_in(hints[key])
        if nested and value is not None and not isinstance(value, Method):
            rebuilt[key] = from_dict(value, nested)
    try:
        return kind(**rebuilt)
    except TypeError as error:
        raise UserError(f"recipe.json: {error}") from error


SECTIONS = {name: kind for name, kind in METHODS.items() if dataclasses.fields(kind)}
"""The methods that have settings, by the name of their section."""


def dataclass_in(hint: object) -> type | None:
    """Return the dataclass that a field's type names (`Lora` for `Lora | None`), or None."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next((option for option in options if isinstance(option, type) and dataclasses.is_dataclass(option)), None)


MAMBA = ("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "mamba", "mamba2", "nemotron_h", "zamba2")
"""Model types whose fused kernels read the weights of the `NOT_IN_MAMBA` modules directly: adapters on these would not
be trained on a GPU, and a 4-bit weight is not a matrix. PEFT refuses some of these types (tuners_utils.py,
`_check_lora_target_modules_mamba`)."""
NOT_IN_MAMBA = ("out_proj", "conv1d")


def lora_options(lora: Lora, scores: bool = False, embeds: bool = False, kind: str = "") -> Json:
    """Return the arguments of `peft.LoraConfig`; if the model scores sequences, PEFT also trains and saves the head.

    With `embeds` the model has no head. For a `kind` (`model_type`) in `MAMBA`, `all-linear` leaves out the modules
    that cannot be adapted, since the model's kernels would read them without their adapters.
    """
    modules = names(lora.target_modules)
    if kind in MAMBA and (past := [name for name in modules if name.rpartition(".")[2] in NOT_IN_MAMBA]):
        raise UserError(
            f"lora.target_modules={lora.target_modules}: {kind}'s kernels read {past[0]} without its adapter; leave it "
            "out."
        )
    if both := [name for name in names(lora.modules_to_save) if name in modules]:
        raise UserError(
            f"lora.modules_to_save={lora.modules_to_save}: {both[0]} is in lora.target_modules, too; a module is "
            "trained whole or gets adapters, so name it in one of them."
        )
    return {
        "exclude_modules": list(NOT_IN_MAMBA) if modules == ["all-linear"] and kind in MAMBA else None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": "all-linear" if modules == ["all-linear"] else modules,
        "target_parameters": names(lora.target_parameters) or None,
        "modules_to_save": names(lora.modules_to_save) or None,
        "use_dora": lora.dora,
        "use_rslora": lora.rslora,
        "init_lora_weights": "pissa_niter_16" if lora.init == "pissa" else True,
        "task_type": "SEQ_CLS" if scores else "FEATURE_EXTRACTION" if embeds else "CAUSAL_LM",
    }
