"""A training file of another tool and the command that it becomes, filled in key by key."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ....recipe import new_tokens
from ....recipe.errors import UserError
from ....recipe.files import JsonView
from ....recipe.methods import METHODS
from ....recipe.new_tokens import NewToken
from ....recipe.overrides import FOREIGN_NAMES, OTHER_TOOLS, answer, key_of, listed, override_keys, setting_of
from ....training.data.forms.formats import FIELDS

ADAPTERS = [name for name, key in FOREIGN_NAMES.items() if key.startswith("lora.")]
"""Other tools' names for settings of adapters."""
SHARED = ("data", "lora", "model", "schedule", "wandb", "layout", "draft")
"""Sections of a recipe with any method."""
WITH_HELD_OUT = "with data.validation=FILE, give"
"""Words before a setting that needs held-out examples."""
SET_TWICE = "another key of the file sets {}; keep one of them"
OFF: tuple[object, ...] = (None, False, "", [], {}, "none", "null")
"""Values that leave an option off."""


class Translation:
    """The settings of a file, and what has become of each.

    `finish` sorts the settings that no other method has recorded: those that mean the same under another name, those
    that a run does by itself, those without an equivalent, and those that are off. So each key is in one list.
    """

    def __init__(self, tool: str, values: JsonView, defaults: JsonView) -> None:
        self.tool = tool
        self.method, self.adapter = "sft", ""
        self.model = ""
        self.gpus = 1
        self.overrides: dict[str, str] = {}
        self.by_default: set[str] = set()
        """Keys of `overrides` that the file does not set: the other tool's default differs from a recipe's."""
        self.options: list[str] = []
        self.translated: dict[str, str] = {}
        self.remarks: list[str] = []
        self.unneeded: dict[str, str] = {}
        self.yours: dict[str, str] = {}
        """Keys that change no update, such as how often a run saves, and that the user has to set."""
        self.missing: dict[str, str] = {}
        self.off: list[str] = []
        """Keys that ask for nothing, and that no other list has."""
        self.complete = False
        """True if the file has every setting of its tool: then a default of the tool is also the file's value."""
        self.values = dict(values)
        check_types(values, KINDS)
        self.defaults = dict(defaults)

    def given(self, key: str) -> bool:
        """Return True if the file sets `key` to something other than nothing."""
        value = self.values.get(key)
        return not any(value is off or (type(value) is type(off) and value == off) for off in OFF)

    def take(self, *names: str) -> Any:
        """Return the value of the first of `names` that the file sets, or its default in the other tool, or None."""
        given = (values[name] for values in (self.values, self.defaults) for name in names if name in values)
        return next((value for value in given if value is not None), None)

    def set(self, key: str, value: object, *sources: str) -> None:
        """Set one of our keys to a value that comes from the file's keys `sources`, or from their defaults."""
        self.overrides[key] = as_text(value)
        used = [name for name in sources if name in self.values]
        for name in used:
            self.note(name, f"{key}={as_text(value)}")
        if not used:
            self.by_default.add(key)

    def rename(self, key: str, *names: str) -> None:
        """Give our `key` the value of the file's key, or its default; `names` are those of the table `same` if none."""
        names = names or (key, *OTHER_TOOLS["same"].get(key, "").split())
        value = self.take(*names)
        if value is not None:
            agree = [name for name in names if self.values.get(name) in (None, value)]
            self.set(key, value, *agree)
            for name in set(names) & self.values.keys() - set(agree):
                self.lack(name, SET_TWICE.format(f"{key}={as_text(value)}"))

    def set_if_given(self, name: str, key: str, value: object = True) -> None:
        """Set our `key` to `value` if the file's option `name` is on."""
        if self.given(name):
            self.set(key, value, name)

    def need_none(self, names: Iterable[str], why: str) -> None:
        """Record why those of the file's keys `names` that ask for something are not needed."""
        self.unneeded |= {name: why for name in names if self.given(name)}

    def add_tokens(self, ordinary: tuple[str, Any], special: tuple[str, Any]) -> None:
        """Set the tokens to add; each argument is a key of the file, and a list or a text with commas, or nothing."""
        tokens, sources = [], []
        for (name, given), is_special in ((ordinary, False), (special, True)):
            if found := [NewToken(word, is_special) for word in words_of(given)]:
                tokens += found
                sources.append(name)
        if tokens:
            plain = not any(one.special or "," in one.content for one in tokens)
            written = [one.content for one in tokens] if plain else new_tokens.as_text(tokens)
            self.set("model.new_tokens", written, *sources)
            if self.adapter:
                self.remarks.append(
                    f"{', '.join(sources)}: adapters train the new tokens' rows; all rows with "
                    "lora.modules_to_save=embed_tokens,lm_head"
                )

    def name_model(self, key: str) -> None:
        """Take the model from the file's key, or record that it is needed."""
        self.model = str(self.take(key) or "MODEL")
        if self.given(key):
            self.note(key, "the model")
        else:
            self.lack("model", f"{key} names none: put its folder or Hub id in place of MODEL")

    def set_rewards(self, key: str, functions: object) -> None:
        """Set the reward functions from a list of, or a text with, names such as `module.function`."""
        named = [name.rpartition(".") for name in words_of(functions)]
        if named and all(module for module, _, _ in named):
            self.set("reward", [f"{module.replace('.', '/')}.py:{name}" for module, _, name in named], key)
        elif named:
            self.lack(key, "TRL's own functions: write them to a file, and give reward=FILE.py:FUNCTION")

    def settle_imitation(self, alpha: object) -> None:
        """Record SimPO's `cpo_alpha`, the weight with which TRL also imitates the better answers."""
        if alpha:
            self.lack("cpo_alpha", "1 unless set: SimPO does not imitate the better answer here, as with cpo_alpha: 0")
        else:
            self.note("cpo_alpha", "as always")

    def note(self, name: str, became: str) -> None:
        """Record what the file's key `name` has become; twice if it has become two things."""
        before = self.translated.get(name)
        self.translated[name] = became if before in (None, became) else f"{before} {became}"

    def leave(self, name: str, how: str) -> None:
        """Record that the file's key `name` changes no update, and how the user sets the same here."""
        self.yours[name] = how

    def lack(self, name: str, why: str) -> None:
        """Record that the file's key `name` has no equivalent."""
        self.translated.pop(name, None)
        self.missing[name] = why

    def rename_column(self, name: str, renamed: dict[str, str], column: str, field: str) -> None:
        """Add a column of one data set to those `renamed`; `data.columns` gives a name one field in all data sets."""
        if renamed.setdefault(column, field) != field:
            self.lack(name, f"{column!r} is {renamed[column]} in one data set, {field} in another; rename it in a file")

    def note_shared_names(self, renamed: Mapping[str, str], named: Sequence[Collection[object]]) -> None:
        """Note a column that is renamed in some data sets and may be a field of others; `named` has each set's columns.

        A run refuses examples that have both names.
        """
        for column, field in renamed.items():
            if column in FIELDS and not all(column in columns for columns in named):
                self.remarks.append(f"data.columns: {column} becomes {field} in every data set that has it")

    def give(self, changes: dict[str, str]) -> None:
        """Let the user's overrides replace the file's settings and complete them."""
        self.overrides |= changes
        self.by_default -= changes.keys()
        for name, why in list(self.missing.items()):
            key = "model.path" if name == "model" else why.rpartition(" ")[2].partition("=")[0]  # "..., give KEY=VALUE"
            if key in changes:
                del self.missing[name]
            elif WITH_HELD_OUT in why and "data.validation" in changes:
                del self.missing[name]
                self.set(*why.rpartition(" ")[2].split("="), name)
        for name, became in self.translated.items():
            words = ["model.path="] if became == "the model" else became.split()
            won = {key: f"{key}={changes[key]} (yours)" for word in words if (key := word.partition("=")[0]) in changes}
            if won:
                self.translated[name] = " ".join(won.get(word.partition("=")[0], word) for word in words)
        self.model = self.overrides.pop("model.path", self.model)

    def finish(self, tool: str) -> None:
        """Sort the keys that are in no list by the tables of other_tools.toml: its own, the tool's and `trainer`'s.

        Leaves out what needs held-out examples or checkpoints that are not there, or goes by another metric.
        """
        parts = {re.split("[.:]", name)[0] for name in self.missing}  # of `lr_scheduler_kwargs.power`
        named = {*self.translated, *self.unneeded, *self.yours, *self.missing, *parts}
        for name in sorted(set(self.values) - named):
            inside = name.partition("].")[2]  # of `datasets[0].shards`
            if not self.given(name):
                on = OTHER_TOOLS[tool]["on"] | OTHER_TOOLS["trainer"]["on"]
                if self.values[name] is False and (why := listed(name, on)):
                    self.missing[name] = why
                else:
                    self.off.append(name)
                continue
            for kind, place in (("unneeded", self.unneeded), ("yours", self.yours), ("missing", self.missing)):
                table = OTHER_TOOLS[f"{tool}_dataset"] if inside else OTHER_TOOLS[tool]
                if why := listed(inside or name, table.get(kind, {}) | OTHER_TOOLS["trainer"].get(kind, {})):
                    place[name] = why
                    break
                if why := OTHER_TOOLS["redundant"].get(f"{inside or name}={as_text(self.values[name])}".lower()):
                    self.unneeded[name] = why
                    break
            else:
                setting, _, value = (setting_of(name, as_text(self.values[name])) or "").partition("=")
                setting = "" if setting in self.overrides else setting  # which other keys of the file decide
                key = setting or key_of(name, self.method)
                section = key.partition(".")[0]
                twice = key in self.overrides and key not in self.by_default
                if twice and self.overrides[key] != as_text(self.values[name]):
                    self.missing[name] = SET_TWICE.format(f"{key}={self.overrides[key]}")
                elif key in override_keys() and not inside and section in (self.method, key, *SHARED):
                    self.set(key, value if setting else self.values[name], name)
                    self.adapter = self.adapter or ("lora" if section == "lora" else "")
                else:
                    self.missing[name] = (
                        f"a setting of {section}" if section in METHODS else answer(name) or "not known here"
                    )
        metric = METHODS[self.method].metric
        for key in [key for key in ("early_stopping", "keep_best") if key in self.overrides]:
            ours = f"{key}={self.overrides[key]}"
            sources = [name for name, became in self.translated.items() if became == ours]
            if "data.validation" not in self.overrides and float(self.overrides.get("data.validation_share", 0)) == 0:
                why = f"there are no held-out examples: {WITH_HELD_OUT} {ours}"
            elif metric is not None:
                why = f"judged by the loss there, and by the {metric.replace('_', ' ')} here, with {ours}"
            elif key == "keep_best" and self.overrides.get("save_steps") == "0":
                why = f"no checkpoint is saved: with save_steps=N, give {ours}"
            else:
                continue
            del self.overrides[key]
            for name in sources:
                self.lack(name, why)


def words_of(value: object) -> list[str]:
    """Return the items of a list, or of a text in which commas separate them."""
    items = value if isinstance(value, list) else [word.strip() for word in str(value or "").split(",")]
    return [str(item) for item in items if str(item)]


def listed_of(value: object) -> list[Any]:
    """Return a list as it is, and one value, which the tools take as well, as a list."""
    return value if isinstance(value, list) else [value]


def check_types(values: JsonView, kinds: Mapping[str, tuple[type, ...]], where: str = "") -> None:
    """Refuse values of another type than the tools read; a missing or empty value is none."""
    for key, expected in kinds.items():
        if (value := values.get(key)) is not None and not isinstance(value, expected):
            wanted = " or ".join(NAMES_OF_TYPES[kind] for kind in expected)
            raise UserError(f"{where}{key}: {as_text(value)}: must be {wanted}.")


NAMES_OF_TYPES = {str: "text", list: "a list", dict: "a mapping", bool: "true or false"}
KINDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("report_to", "dataset", "eval_dataset", "reward_funcs", "unfrozen_parameters"), (str, list)),
    **dict.fromkeys(("lora_target", "lora_target_modules", "tokens", "add_tokens"), (str, list)),
    **dict.fromkeys(("deepspeed", "fsdp_config"), (str, dict)),
    **dict.fromkeys(("model_name_or_path", "base_model", "stage", "finetuning_type"), (str,)),
    **dict.fromkeys(("template", "rl", "adapter"), (str,)),
    **dict.fromkeys(("dataset_name", "dataset_dir", "output_dir", "optim", "optimizer", "lr_scheduler_type"), (str,)),
    "trl": (dict,),
}
"""The types of values of which a translation reads parts."""


def as_text(value: object) -> str:
    """Return a value as an override: `none`, `true`, or items separated by commas."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)
