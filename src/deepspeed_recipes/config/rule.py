"""The linter's data types: rules, the config and the facts that they read, and the findings that they report.

Dimensions are read from a model's `config.json` like transformers does, with each model type's names and defaults:
GPT-2 has `n_embd` instead of `hidden_size`, and a nested text configuration omits the defaults of its class.
`model_types.json` holds both for every model type of transformers (`scripts/maintain/schema/model_types.py`), so that
nothing here imports transformers.
"""

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from ..recipe.deepspeed_file import SWITCHES
from ..recipe.errors import UserError
from ..recipe.files import Json
from ..recipe.run_folder import read_json
from .read import Document, Key, Problem

MODEL_TYPES = Path(__file__).with_name("model_types.json")
DIMENSIONS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config", "decoder", "generator")


@cache
def _types() -> dict[str, Json]:
    types: dict[str, Json] = json.loads(MODEL_TYPES.read_text())
    return types


def dimension(model: Json, name: str) -> int | None:
    """Return one of DIMENSIONS, without looking into nested configs, or None if it is unknown."""
    known = _types().get(str(model.get("model_type")), {})
    own, default = known.get(name, (name, None))
    for value in (model.get(name), model.get(own), default):
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def text_model(model: Json) -> Json:
    """Return the part of a model's config that holds the sizes of the language model."""
    for name in _NESTED:
        if isinstance(inner := model.get(name), dict):
            return text_model(inner)
    kind = _types().get(str(model.get("model_type")), {}).get("text_config")
    return {"model_type": kind} if kind else model


def hidden_size(model: Json, nested: bool = True) -> int | None:
    """Return the hidden size that the Trainer finds in a model's config, the largest if there are several.

    The Trainer also looks into `text_config`; a bare Accelerator does not (`nested=False`).
    """
    if (size := dimension(model, "hidden_size")) is not None:
        return size
    sizes = model.get("hidden_sizes")
    if isinstance(sizes, list) and sizes and all(isinstance(size, int) for size in sizes):
        return int(max(sizes))
    kind = _types().get(str(model.get("model_type")), {}).get("text_config")
    inner = model.get("text_config", {"model_type": kind} if kind else None)
    if not nested or not isinstance(inner, dict):
        return None
    return hidden_size({"model_type": kind, **inner}, nested=False)


def model_config(path: str | Path) -> Json:
    """Return the `config.json` at `path`, or in the folder `path`."""
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    config = read_json(file)
    if not isinstance(config, dict):
        raise UserError(f"{file}: a model's config.json is a JSON object.")
    return config


Severity = Literal["error", "warning"]

REJECTED = "rejected"
"""DeepSpeedConfig raises."""
FAILS_LATER = "fails later"
"""DeepSpeedConfig accepts the file; the engine or the Trainer stops before or during the first steps."""
WRONG = "loads but wrong"
"""The run starts but does not do what the file sets."""
COSTS = "costs"
"""The run does what the file sets, but takes more memory, time or disk than necessary."""

TRUE_TEXTS = {"1", "on", "t", "true", "y", "yes"}
"""The strings, without case, that typed sections read as true."""


@dataclass(frozen=True)
class Edit:
    """One safe change: `set` and `remove` the key at `path`, or `rename` its last part to `value`."""

    action: Literal["set", "remove", "rename"]
    path: Key
    value: object = None


@dataclass(frozen=True)
class Hit:
    """A place in the config where a rule applies."""

    path: Key
    value: object
    what: str
    """One sentence: what happens here."""
    fix: str = ""
    """The fix for this place; if empty, the rule's general fix."""
    edits: tuple[Edit, ...] = ()
    severity: Severity | None = None
    """The severity, if it differs from the rule's."""


@dataclass(frozen=True)
class Facts:
    """Facts about the run that are not in the config; None means unknown, and is not checked."""

    trainer: Literal["hf", "plain"] = "hf"
    world_size: int | None = None
    gpus_per_node: int | None = None
    model: Json | None = None
    """The model's `config.json`."""
    gpu_memory_gib: float | None = None
    lora: bool = False
    sequence_parallel_size: int = 1
    pipeline_stages: int = 1
    arguments: Mapping[str, object] | None = None
    """The known TrainingArguments by their names."""

    @property
    def text_model(self) -> Json:
        """The part of the model's config that holds the sizes of the language model."""
        return text_model(self.model or {})


@dataclass(frozen=True, eq=False)
class Config:
    """A parsed config whose values may have any type: look-ups never fail. Compared and hashed by identity."""

    value: Json
    problems: tuple[Problem, ...] = ()
    places: dict[Key, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, document: Document) -> "Config":
        """Return a config with the positions from its file."""
        return cls(document.value, document.problems, document.places)

    def get(self, *path: str | int, default: object = None) -> object:
        """Return the value at `path`, or `default` if a part of the path is missing or not an object."""
        node: object = self.value
        for name in path:
            if not isinstance(node, dict) or name not in node:
                return default
            node = node[name]
        return node

    def has(self, *path: str | int) -> bool:
        """Return whether the key at `path` exists; its value may be null."""
        return self.get(*path, default=_NOTHING) is not _NOTHING

    def on(self, *path: str, default: bool = False) -> bool:
        """Return the switch at `path` as typed sections read it, or `default` for "auto" and wrong types."""
        value = self.get(*path, default=default)
        if isinstance(value, str) and value != "auto":
            return value.lower() in TRUE_TEXTS
        return bool(value) if isinstance(value, (bool, int, float)) else default

    def number(self, *path: str) -> float | int | None:
        """Return the number at `path`, or None; true and false do not count as numbers."""
        value = self.get(*path)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def text(self, *path: str) -> str | None:
        """Return the string at `path`, or None."""
        value = self.get(*path)
        return value if isinstance(value, str) else None

    def section(self, *path: str | int) -> Json:
        """Return the object at `path`, or an empty one."""
        value = self.get(*path)
        return value if isinstance(value, dict) else {}

    @property
    def stage(self) -> int | None:
        """The ZeRO stage, or None if it is "auto" or not a stage."""
        zero = self.get("zero_optimization", default={})
        if isinstance(zero, bool):
            return int(zero)
        if not isinstance(zero, dict):
            return None
        stage = zero.get("stage", 0)
        if isinstance(stage, str) and stage in ("0", "1", "2", "3"):
            return int(stage)  # a typed section accepts a number in quotes
        return int(stage) if isinstance(stage, (int, float)) and stage in (0, 1, 2, 3) else None

    def offload_device(self, what: str) -> str | None:
        """Return the device of `offload_optimizer` or `offload_param`, or None without offload."""
        device = self.text("zero_optimization", what, "device")
        if device is None and self.on("zero_optimization", SWITCHES[what]):
            return "cpu"
        return None if device in (None, "none", "auto") else device


Check = Callable[[Config, Facts], Iterable[Hit]]
"""Yields the places where a rule applies."""


@dataclass(frozen=True)
class Rule:
    """One kind of mistake in a config. TROUBLESHOOTING.md shows the texts."""

    id: str
    severity: Severity
    kind: str
    symptom: str
    """The error message that a user would search for, in quotes, or the silent effect."""
    cause: str
    fix: str
    check: Check


@cache
def _texts() -> dict[str, dict[str, str]]:
    return tomllib.loads(Path(__file__).with_name("rules").joinpath("rules.toml").read_text(encoding="utf-8"))


def rule(id: str, severity: Severity, kind: str) -> Callable[[Check], Rule]:
    """Return a decorator that makes a rule of its check; `rules/rules.toml` has the texts of the rule `id`."""
    return lambda check: Rule(id, severity, kind, **_texts()[id], check=check)


@dataclass(frozen=True)
class Finding:
    """A report about one place in the config."""

    rule: str
    severity: Severity
    key: str
    """The path of the key, as `zero_optimization.stage`; empty for the file as a whole."""
    line: int | None
    column: int | None
    value: object
    what: str
    fix: str
    edits: tuple[Edit, ...] = ()

    def as_json(self) -> Json:
        """Return the finding as `ds-recipes check --json` prints it."""
        names = ("rule", "severity", "key", "line", "column", "value", "what", "fix")
        return {name: getattr(self, name) for name in names}


def dotted(path: Key) -> str:
    """Return `("a", 0, "b")` as `a[0].b`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def shown(value: object) -> str:
    """Return a value as JSON for a message, cut to 60 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


_NOTHING = object()
