"""Applies overrides such as `learning_rate=5e-5 lora.rank=32` to a recipe, and returns two recipes' differences."""

import contextlib
import dataclasses
import difflib
import functools
import os
import re
import sys
import tomllib
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from . import pages
from .bounds import Several, expected, shown, typed
from .conversions import SECTIONS, dataclass_in, from_dict, hints_of, to_dict
from .errors import UserError, redact
from .files import Json
from .methods import METHODS, Method
from .project import CONFIGS
from .recipe import BUILT_IN, Lora, Recipe
from .sections import OUR_OPTIMIZERS, PAGED, why_impossible


def _each(table: Json) -> Json:
    """Return a table with a row for each of the names that a row has in common, also in the tables within it."""
    rows = {names: _each(row) if isinstance(row, dict) and names != "guesses" else row for names, row in table.items()}
    return {name: row for names, row in rows.items() for name in names.split()}


OTHER_TOOLS = _each(tomllib.loads(Path(__file__).with_name("other_tools.toml").read_text(encoding="utf-8")))
"""Other tools' names for our keys and options, and what becomes of those that have none."""
FOREIGN_NAMES: dict[str, str] = {
    theirs: ours
    for table in ("same", "names")
    for ours, named in OTHER_TOOLS[table].items()
    for theirs in named.split()
}
SAME = frozenset(" ".join(OTHER_TOOLS["same"].values()).split())
"""Those that take the same values as our keys."""

TOOLS = ("trainer", "trl", "llama_factory", "axolotl")
"""The tables of keys without an equivalent."""

MOST_UNKNOWN = 5
"""Unknown keys that a message explains; it lists the others."""

SWITCHES = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(("false", "0", "no", "off"), False)

SCHEDULES_REFUSED = {
    "reduce_lr_on_plateau": "DeepSpeed's engine advances the schedule by itself after each update, without a metric",
    "greedy": "DeepSpeed's engine advances the schedule by itself after each update, without a loss",
}
"""transformers' schedules that cannot be used -> the reason."""

# These fields follow from the recipe's name; an override cannot change them.
_IDENTITY = {
    *("family", "size", "variant", "page", "borrower", "method", "code"),
    *("model.config", "model.parameters", "draft.enabled"),
}


def override_keys(kind: type = Recipe, prefix: str = "") -> Json:
    """Return every override key with its type, in the order of the fields."""
    keys: Json = {}
    hints = hints_of(kind)
    for name, hint in ((field.name, hints[field.name]) for field in dataclasses.fields(kind)):
        nested = dataclass_in(hint)
        if nested is Method:
            for section, method in SECTIONS.items():
                keys |= override_keys(method, f"{section}.")
        elif nested:
            keys |= override_keys(nested, f"{prefix}{name}.")
        elif prefix + name not in _IDENTITY:
            keys[prefix + name] = hint
    return keys


def comma_keys(kind: type = Recipe, prefix: str = "") -> set[str]:
    """Return the override keys whose value may hold several values, separated by commas."""
    found: set[str] = set()
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        nested = dataclass_in(hint)
        if nested is Method:
            found = found.union(*(comma_keys(method, f"{section}.") for section, method in SECTIONS.items()))
        elif nested:
            found |= comma_keys(nested, f"{prefix}{name}.")
        elif any(isinstance(mark, Several) for mark in getattr(hint, "__metadata__", ())):
            found.add(prefix + name)
    return found


def apply(recipe: Recipe, assignments: Iterable[str], *, resumed: bool = False) -> Recipe:
    """Return `recipe` with all `key=value` assignments applied; the last assignment to a key wins, with a warning.

    They are applied at once, so their order never makes a valid set invalid. In a `resumed` run's recipe, other data
    changes no other setting.
    """
    keys, values = override_keys(), to_dict(recipe)
    assignments = list(assignments)
    for index, assignment in enumerate(assignments):
        name, _, text = assignment.partition("=")
        # The method's own key for another tool's, `kto.beta` for `beta`.
        if name in OF_METHOD and (own := key_of(name, recipe.method.name)) != name:
            say_once(f"{name} is read as {own}")
            assignments[index] = f"{own}={text}"
    if wrong := [key for key in dict.fromkeys(keys_of(word for word in assignments if "=" in word)) if key not in keys]:
        lines = [unknown(key, list(keys), recipe.method.name) for key in wrong[:MOST_UNKNOWN]]
        if more := wrong[MOST_UNKNOWN:]:
            lines.append(f"unknown, too: {', '.join(more)}.")
        raise UserError("\n".join(lines))
    given: dict[str, str] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if re.fullmatch(r"\[.*\]", text) and key in comma_keys() - {"model.new_tokens"}:  # a token may be [INST]
            values_alone = re.sub("[][\"' ]", "", text)
            fix = f"write the values alone, separated by commas: {key}={values_alone}"
            raise UserError(redact(f"{assignment}: {fix}"))
        if given.get(key, text) != text:
            say_once(f"{key} is given twice, as {shown(given[key])} and {shown(text)}: the last one counts")
        given[key] = text
        if not equals:
            raise UserError(f"{redact(assignment)!r} is not an override; write key=value, e.g. learning_rate=5e-5.")
        section, _, name = key.rpartition(".")
        if section == "lora" and values["lora"] is None:
            # Setting a key of `lora` turns adapters on.
            values["lora"] = dataclasses.asdict(Lora())
        (values.setdefault(section, {}) if section else values)[name] = parse(key, text, keys[key])
    _follow(recipe, values, given, resumed)
    changed: Recipe = from_dict(values)
    # A run would ignore settings of other methods, and fail to measure their metrics.
    method = changed.method
    for key in sorted(given):
        wanted = "grpo" if key == "reward" else key.partition(".")[0]
        if wanted in METHODS and wanted != method.name:
            taught = wanted == "distill" and method.name == "sft"  # a teacher turns only SFT into distillation
            how = "add distill.teacher=MODEL" if taught else "ds-recipes launch --list has its variants"
            what = f"a setting of the method {wanted}, but this recipe's method is {method.name}"
            raise UserError(f"{key}: {what}; {how}.")
    measured = ("loss", method.metric or "exact_match")
    foreign = [name for name in changed.data.metrics if name in BUILT_IN and name not in measured]
    if foreign and "data.metric" in given:
        known = " and ".join(measured)
        raise UserError(f"data.metric={foreign[0]}: {method.title} measures {known}, not {foreign[0]}.")
    return changed


def _follow(recipe: Recipe, values: Json, given: Collection[str], resumed: bool) -> None:
    """Change the values that follow from the given keys, unless they are given themselves.

    With other data, those that fit the page's own are reset: its held-out examples, number of examples and metric. A
    share of the new data is held out instead; a stream cannot be split.
    """
    data, own, chosen = values["data"], "data.path" in given and not resumed, "data.validation" in given
    if own and not chosen:
        data["validation"] = None
    if own and "data.max_examples" not in given:
        data["max_examples"] = None
    if (own or chosen) and "data.validation_share" not in given:
        data["validation_share"] = 0.0 if chosen or data["streaming"] else "auto"
    if (own or (chosen and not resumed)) and "data.metric" not in given and data["metric"] == "exact_match":
        data["metric"] = "loss"
    if "distill.teacher" in given and values["method"] == "sft":
        # Supervised fine-tuning with a teacher is distillation.
        values["method"] = "distill"
    if "optimizer" in given and "max_grad_norm" not in given and values["optimizer"] == "muon":
        values["max_grad_norm"] = 0.0  # see `Recipe.max_grad_norm`
    if values["lora"] is not None and recipe.lora is None and "learning_rate" not in given:
        # As the page's `lora` relative to its `full`, or ten times the rate, at which adapters learn as well as all
        # weights, with SFT and with reinforcement learning (Schulman et al. 2025, LoRA Without Regret).
        ratio = 10.0
        with contextlib.suppress(UserError):
            full, lora = (pages.find(pages.typed(recipe), variant) for variant in ("full", "lora"))
            ratio = lora.learning_rate / full.learning_rate
        values["learning_rate"] = float(f"{recipe.learning_rate * ratio:.6g}")


def word(text: str) -> str:
    """Return a word of the command line, with our key for another tool's that takes the same values; print a line."""
    key, equals, value = text.partition("=")
    ours = setting_of(key, value)
    if FOREIGN_NAMES.get(key, key) == "optimizer" and value in OUR_OPTIMIZERS and not value.startswith("paged_"):
        ours = f"optimizer={OUR_OPTIMIZERS[value]}"
    if ours and ours != text:
        print(f"{text} is read as {ours}", file=sys.stderr)
        return ours
    if not equals or key not in SAME:
        return text
    if key == "warmup_ratio" and value.replace(".", "", 1).isdigit() and float(value) >= 1:
        raise UserError(f"{text}: a share of the steps is below 1; schedule.warmup={value} would be a number of steps.")
    print(f"{key} is read as {FOREIGN_NAMES[key]}", file=sys.stderr)
    return f"{FOREIGN_NAMES[key]}={value}"


OF_METHOD = ("beta", "pref_beta", "loss_type", "pref_loss", "label_smoothing")
"""Names of other tools for settings that several methods have."""


def setting_of(name: str, value: str) -> str | None:
    """Return our `key=value` for another tool's setting that is one of ours, or None."""
    known: dict[str, str] = OTHER_TOOLS["settings"]
    return known.get(f"{name}={value}".lower()) or known.get(f"{name}={str(SWITCHES.get(value.lower())).lower()}")


def key_of(name: str, method: str) -> str:
    """Return our key for another tool's name that takes the same values, or the name; the method's own key first."""
    own = f"{method}.{FOREIGN_NAMES[name].rpartition('.')[2] if name in OF_METHOD else name}"
    return own if own in override_keys() else FOREIGN_NAMES[name] if name in SAME else name


@functools.cache
def say_once(text: str) -> None:
    """Print a line to standard error, once in this process."""
    print(text, file=sys.stderr)


def is_redundant(text: str, words: Iterable[str] = ()) -> bool:
    """Return whether one of the `words` of a command is a setting of another tool that adds nothing; print a line."""
    key, equals, value = text.partition("=")
    why = OTHER_TOOLS["redundant"].get(text.lower())
    if key in OTHER_TOOLS["of_the_variant"]["keys"].split():
        plain = "full lora qlora dora" if value == "sft" else ""
        why = next(
            (f"the variant is {word}" for word in words if value in word.split("_") or word in plain.split()), None
        )
    tables = (FOREIGN_NAMES, OTHER_TOOLS["words"], OTHER_TOOLS["options"], override_keys())
    if why is None and equals and not setting_of(key, value) and not any(key in table for table in tables):
        why = next(filter(None, (listed(key, OTHER_TOOLS[tool]["unneeded"]) for tool in TOOLS)), None)
        if value.lower() in ("false", "none") and any(
            listed(key, OTHER_TOOLS[tool].get("yours", {})) for tool in TOOLS
        ):
            why = "it leaves an option off"
    if why:
        print(f"{text} is left out: {why}", file=sys.stderr)
    return bool(why)


def is_known(key: str) -> bool:
    """Return whether a name is a key, or a name in other tools of which something is known."""
    settings = (*OTHER_TOOLS["settings"], *OTHER_TOOLS["redundant"])
    return key in {*FOREIGN_NAMES, *override_keys(), *keys_of(settings)} or answer(key) is not None


def takes(key: str, text: str, named: bool) -> bool:
    """Return whether the word after an option that is named like a key is its value; a switch may have none.

    A word after another tool's option may also be the recipe or the variant, unless the command has `named` them.
    """
    hint = override_keys().get(FOREIGN_NAMES.get(key, key))
    if {f"{key}=true", f"{key}=false"} & {*OTHER_TOOLS["settings"], *OTHER_TOOLS["redundant"]}:
        return text.lower() in SWITCHES
    if bool in (hint, *typing.get_args(hint)):
        return text.lower() in SWITCHES
    if hint is None and not named:
        return text.lower() in SWITCHES or text.isdigit()
    return not text.startswith("--") and (hint is not None or "=" not in text)


def keys_of(assignments: Iterable[str]) -> list[str]:
    """Return the keys of `key=value` assignments."""
    return [assignment.partition("=")[0] for assignment in assignments]


def differences(before: Recipe, after: Recipe, *, resumed: bool = False) -> list[str]:
    """Return the overrides, as typed, that turn one recipe into another.

    Unless the recipe is a `resumed` run's, `data.path` also sets the source of the held-out examples, and both set the
    metric: these are then not repeated.
    """
    sources: list[str] = []
    start = before
    for key in ("data.path", "data.validation"):
        if value_of(after, key) != value_of(start, key):
            sources += as_typed(after, [key])
            start = apply(before, sources, resumed=resumed)
    rest = [key for key in override_keys() if value_of(after, key) != value_of(start, key)]
    return [*sources, *as_typed(after, rest)]


def as_typed(recipe: Recipe, keys: Iterable[str]) -> list[str]:
    """Return a recipe's values for `keys` as overrides: `key=value`."""
    return [f"{key}={typed(value_of(recipe, key))}" for key in keys]


def value_of(recipe: Recipe, key: str) -> Any:
    """Return a recipe's value for a key: None in a section that it lacks, and the default in another method's."""
    section, _, name = key.rpartition(".")
    if section in SECTIONS:
        return getattr(recipe.method if recipe.method.name == section else SECTIONS[section](), name)
    value: object = recipe
    for part in key.split("."):
        value = getattr(value, part, None)
    return value


def parse(key: str, text: str, hint: object) -> Any:
    """Return `text` as a value of type `hint`."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    if type(None) in options and text.lower() in ("none", "null"):
        return None
    kind = next(option for option in options if option is not type(None))
    words = [word for option in options[1:] for word in typing.get_args(option)]
    if text in words:
        return text
    if key == "schedule.kind":
        if why := SCHEDULES_REFUSED.get(text):
            raise UserError(f"{key}={text}: {why}; use cosine, or a fixed warmup_stable_decay.")
        text = {"wsd": "warmup_stable_decay"}.get(text, text)
    if key == "lora.target_modules" and text == "all":
        text = "all-linear"
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if key == "optimizer" and (why := why_impossible(text)):
            raise UserError(f"{key}={shown(text)}: {why}; use one of {', '.join(choices)}.")
        if key == "optimizer" and text not in choices and text in OUR_OPTIMIZERS:
            remark = f" ({PAGED})" if text.startswith("paged") else ""
            raise UserError(f"{key}={shown(text)}: use {key}={OUR_OPTIMIZERS[text]}{remark}.")
        if text not in choices:
            raise UserError(f"{key}={shown(text)}: must be one of {', '.join(choices)}.")
        return text
    if kind is bool:
        if text.lower() not in SWITCHES:
            raise UserError(f"{key}={shown(text)}: must be {', '.join(['true', *words])} or false.")
        return SWITCHES[text.lower()]
    try:
        value = kind(text)
    except ValueError:
        raise UserError(f"{key}={shown(text)}: must be {expected((kind,), tuple(words))}.") from None
    if key == "deepspeed" and f"{text}.json" in os.listdir(CONFIGS) and not Path(text).exists():
        return f"{text}.json"  # `configs copy` takes the short name, too
    if kind is str and not text.strip():
        raise UserError(f"{key}={text}: the value is missing.")
    return value


def unknown(key: str, known: list[str], method: str = "") -> str:
    """Return the message for an unknown key: our key for a name from another tool, or the nearest key."""
    if not key:
        return "=: write key=value without blanks, e.g. max_steps=3."
    last = key.rpartition(".")[2]  # data.system_prompt
    if (theirs := key if key in FOREIGN_NAMES else last) in FOREIGN_NAMES:
        ours = FOREIGN_NAMES[theirs]
        if (own := f"{method}.{ours.rpartition('.')[2]}") in known:  # kto.beta, not dpo.beta
            ours = own
        meaning = f" ({OTHER_TOOLS['meanings'][ours]})" if ours in OTHER_TOOLS["meanings"] else ""
        return f"unknown key {key!r}; use {ours!r}{meaning}."
    if option := OTHER_TOOLS["options"].get(key):
        return f"unknown key {key!r}; use ds-recipes launch's option {option}."
    if why := answer(key) or answer(last):
        return f"unknown key {key!r}; {why}."
    if key in _IDENTITY:
        return f"{key!r} cannot be overridden; it follows from the recipe that you choose (ds-recipes launch --list)."
    short = {name.rpartition(".")[2]: name for name in known}
    holding = [name for name in known if key in name.replace(".", "_").split("_")]
    near = holding if len(holding) == 1 else difflib.get_close_matches(key, [*known, *short], n=1, cutoff=0.6)
    hint = f" Did you mean {short.get(near[0], near[0])!r}?" if near else ""
    return f"unknown key {key!r}.{hint} ds-recipes launch --help lists all keys."


def answer(name: str) -> str | None:
    """Return the advice for a key of another tool that has no equivalent."""
    tables = (OTHER_TOOLS[tool].get(kind, {}) for tool in TOOLS for kind in ("unneeded", "on", "yours", "missing"))
    return next(filter(None, (listed(name, table) for table in (OTHER_TOOLS["words"], *tables))), None)


def listed(name: str, table: Mapping[str, str]) -> str | None:
    """Return a table's entry for a key; a key of the table that ends with * is a prefix."""
    return next(
        (why for key, why in table.items() if name == key or (key[-1] == "*" and name.startswith(key[:-1]))), None
    )
