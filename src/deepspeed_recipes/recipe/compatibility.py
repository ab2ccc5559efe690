"""The table of settings, methods, layouts and DeepSpeed files that cannot be combined, each with reason and remedy.

The rows are in compatibility.toml, and no other module refuses a combination. `Recipe` refuses what a recipe alone
settles, `limits` what its model, its DeepSpeed file or the number of ranks settles, and the ranks raise `refusal` for
what depends on the model itself. The planner drops candidates by the same rows, `ds-recipes launch --help KEY`
prints them, and a part of configs/README.md is generated from them.
"""

import itertools
import math
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

from . import own_code
from .bounds import typed
from .errors import UserError
from .files import JsonView, text_of
from .methods import METHODS

Moment = Literal["recipe", "model", "run", "unread"]
"""A row depends on the recipe alone, on its model's dimensions, or on its DeepSpeed file, layout and ranks. The rows
of `unread` refuse nothing: the launcher names settings of the command line that another leaves without effect."""


@dataclass(frozen=True)
class Case:
    """A recipe, with its DeepSpeed file and the number of ranks where these are known."""

    recipe: Any
    """A `Recipe`, whose module imports this one."""
    file: Any = None
    ranks: int = 1

    def value(self, key: str) -> Any:
        """Return the value of a key, `method.TRAIT`, `file.FIELD` or `file.BLOCK.KEY`; MISSING in an absent section."""
        return _getter(key)(self)

    def dimension(self, *names: str) -> Any:
        """Return the first of several names that the model's configuration has, or None."""
        config = text_of(self.recipe.model.config)
        return next((config[name] for name in names if config.get(name)), None)


MISSING = object()
Values = JsonView
"""Values for the braces in a row's reason and remedy."""
Test = Callable[[Case], bool]


class Row(NamedTuple):
    """A setting, the condition under which it cannot be used, and why."""

    moment: Moment
    setting: str
    when: str
    """A condition: `lora.init=pissa`, `layout.tensor>1`, `method.reference` (is true), several joined by ` and `; or a
    name in `COMPUTED`."""
    reason: str
    remedy: str = ""
    """The fix, as a clause; empty for layouts, since `limits` finds the nearest one that runs."""


# ---- Architectures ---------------------------------------------------------------------------------------------------

_TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
FAMILIES: Mapping[str, Mapping[str, str]] = {
    kind: {name: why for names, why in rows.items() for name in names.split()}
    for kind, rows in _TEXTS["families"].items()
}
"""Why a kind of parallelism does not train an architecture correctly, by the layout's field and `model_type`."""

TENSOR_PARALLEL_TYPES = (
    *("gemma2", "gemma3_text", "glm4", "gpt_neox", "granite", "llama", "ministral3", "mistral", "olmo3", "phi3"),
    *("qwen2", "qwen3", "qwen3_5_text", "seed_oss", "smollm3"),
)
"""Model types that transformers' plan splits correctly (`tests/test_tensor.py` checks this against every recipe). For
other types `training/parallel/tensor.py` determines which layers can be split, or refuses the run."""
EXPERT_PARALLEL_TYPES = ("deepseek_v2", "deepseek_v3", "mixtral", "qwen3_moe")
"""Model types for which DeepSpeed has a preset with which expert parallelism trains like plain PyTorch
(`tests/parity/test_expert.py`). For other types `training/parallel/expert.py` makes one, or refuses the run."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names in config.json for the number of experts per layer."""
ENDS = frozenset(("embed_tokens", "wte", "embed_in", "word_embeddings", "lm_head", "embed_out", "output"))
"""Names of embeddings and heads, on which adapters do not train in a pipeline: DeepSpeed copies a tied weight between
stages by its name, and the export joins only weights that every stage has."""
NO_CLASSIFIER = (
    *("falcon_h1", "glm4_moe", "granite", "lfm2", "minimax_m2", "nemotron_h", "olmoe", "qwen3_5_moe_text"),
)
"""Model types of the pages for which transformers has no sequence classifier (checked by `tests/test_reward.py`)."""
FURTHER_TOKEN_TYPES = ("deepseek_v3", "glm4_moe")
"""Model types whose head for a further token transformers describes (checked by `tests/test_upstream.py`)."""


# ---- Conditions that compare numbers or look into the model's configuration ------------------------------------------


def positions(config: JsonView) -> float:
    """Return a model's number of positions, or infinity if its config, or its text model's, does not limit it."""
    text = text_of(config)
    return text.get("max_position_embeddings") or text.get("n_positions") or math.inf


def _without_further_token(case: Case, _: str) -> Values | None:
    kind, count = case.dimension("model_type"), case.dimension("num_nextn_predict_layers", "num_mtp_layers") or 1
    if kind is None or (kind in FURTHER_TOKEN_TYPES and count == 1):
        return None
    return {"kind": kind, "count": count, "known": " and ".join(FURTHER_TOKEN_TYPES)}


def _family(case: Case, technique: str) -> Values | None:
    kind = case.dimension("model_type")
    found = FAMILIES[technique].get(kind) if kind else None
    return {"kind": kind, "why": found} if found else None


def _not_divisible(number: int | None, size: int, factors: str = "") -> Values | None:
    return {"number": number, "size": f"{size}{factors}"} if number and number % size else None


def _heads(case: Case, technique: str) -> Values | None:
    layout, heads = case.recipe.layout, case.dimension("num_attention_heads", "n_head")
    if technique == "tensor":
        return _not_divisible(heads, layout.tensor)
    factors = " (sequence x tensor)" if layout.tensor > 1 else ""
    return _not_divisible(heads, layout.sequence * layout.tensor, factors)


def _ranks_left_over(case: Case, _: str) -> Values | None:
    layout = case.recipe.layout
    size = layout.tensor * layout.pipeline * layout.sequence
    if case.ranks % size:
        return {"number": f"{case.ranks} ranks", "size": f"{size} (tensor x pipeline x sequence)"}
    if case.ranks // size % layout.expert:
        return {"number": f"{case.ranks // size} data-parallel ranks", "size": f"{layout.expert} (expert)"}
    return None


def _split(case: Case, but: str) -> bool:
    names = {"tensor", "pipeline", "sequence", "expert"} - {but}
    return any(getattr(case.recipe.layout, name) > 1 for name in names)


def _has_own_metric(case: Case) -> bool:
    return bool(own_code.functions("data.metric", case.recipe.data.metric))


def _adapters_at_the_ends(case: Case, _: str) -> Values | None:
    targets = case.recipe.lora.target_modules.split(",") if case.recipe.lora else ()
    outside = sorted(name.strip() for name in targets if name.strip().rpartition(".")[2] in ENDS)
    return {"outside": ", ".join(outside)} if outside else None


Conflict = Values | bool | None
"""The values that a reason names, True if it names none, or something false without a conflict."""
COMPUTED: Mapping[str, Callable[[Case, str], Conflict]] = {
    "always()": lambda case, _: True,
    "too_long()": lambda case, _: (
        (most := positions(case.recipe.model.config)) < case.recipe.sequence_length and {"most": most}
    ),
    "without_classifier()": lambda case, _: (kind := case.dimension("model_type")) in NO_CLASSIFIER and {"kind": kind},
    "without_further_token()": _without_further_token,
    "beyond_vocabulary()": lambda case, _: (
        (size := case.dimension("vocab_size") or math.inf) < case.recipe.method.top_k and {"size": size}
    ),
    "family()": _family,
    "method()": lambda case, technique: (found := case.recipe.method.excludes.get(technique)) and {"why": found},
    "heads()": _heads,
    "shared_heads()": lambda case, _: _not_divisible(case.dimension("num_key_value_heads"), case.recipe.layout.tensor),
    "experts()": lambda case, _: _not_divisible(case.dimension(*EXPERT_COUNTS), case.recipe.layout.expert),
    "ranks_left_over()": _ranks_left_over,
    "split()": _split,
    "too_few_layers()": lambda case, _: (
        (layers := case.dimension("num_hidden_layers", "n_layer") or math.inf) < case.recipe.layout.pipeline
        and {"layers": layers}
    ),
    "adapters_at_the_ends()": _adapters_at_the_ends,
    "without_experts()": lambda case, _: (
        (kind := case.dimension("model_type")) and not case.dimension(*EXPERT_COUNTS) and {"kind": kind}
    ),
    "judges_answers()": lambda case, _: "exact_match" in case.recipe.data.metrics,
    "own_metric_in_pipeline()": lambda case, _: case.recipe.layout.pipeline > 1 and _has_own_metric(case),
    "own_metric_without_answers()": lambda case, _: (
        case.recipe.method.examples not in ("conversations", "prompts") and _has_own_metric(case)
    ),
    "by_epoch()": lambda case, _: any(isinstance(one, str) for one in (case.recipe.save_steps, case.recipe.eval_steps)),
    "only_files()": lambda case, _: all(os.path.isfile(one.strip()) for one in case.recipe.data.path.split(",")),
    "no_tracker()": lambda case, _: not case.recipe.trackers,
    "no_projects()": lambda case, _: not {"wandb", "mlflow", "trackio"} & {*case.recipe.trackers},
    "no_names()": lambda case, _: not {"wandb", "mlflow"} & {*case.recipe.trackers},
    "no_wandb()": lambda case, _: "wandb" not in case.recipe.trackers,
}
"""Conditions of the table that are functions of a case and of the layout's field that a row is about."""


# ---- The table -------------------------------------------------------------------------------------------------------

_MOMENTS: Mapping[str, Moment] = {
    "recipe": "recipe",
    "model": "model",
    "file": "run",
    "layout": "run",
    "unread": "unread",
}
TABLE: tuple[Row, ...] = tuple(
    Row(moment, setting, when, reason, block.get("remedy", ""))
    for name, moment in _MOMENTS.items()
    for block in _TEXTS[name]
    for setting in block.get("settings", [block.get("setting")])
    for when, reason in block.items()
    if when not in ("setting", "settings", "remedy")
)
"""Every combination that is refused before a model is loaded, in the order in which they are checked; then the settings
that are not read."""
LAYOUT = frozenset(block["setting"] for block in _TEXTS["layout"])
"""The settings of the rows that another layout may answer."""
PROBED: Mapping[str, str] = _TEXTS["probed"]
"""Conditions on the model itself, a checkpoint or the installed DeepSpeed."""


# ---- Reading the table -----------------------------------------------------------------------------------------------


def refusal(row: str, **values: object) -> UserError:
    """Return the error for a row of `PROBED`."""
    return UserError(PROBED[row].format(**values))


def check(case: Case, moment: Moment) -> None:
    """Refuse a case by the rows of a moment that have a remedy; `limits` refuses layouts and names the nearest."""
    for row, values in conflicts(case, moment):
        if not row.remedy:
            continue
        settings = _as_typed(case, row.setting)
        if row.when not in COMPUTED:  # `lora.init=pissa with model.quantization=nf4`
            other = _as_typed(case, row.when)
            settings += f" {other}" if other.startswith("without ") else f" with {other}"
        elif settings.startswith("without "):
            settings = f"{settings.removeprefix('without ')} is not set"
        raise UserError(f"{settings}: {row.reason.format(**values)}; {row.remedy.format(**values)}.")


def unread(case: Case, given: Collection[str]) -> Iterator[str]:
    """Yield a line for each of the `given` keys that the recipe does not read, with the reason.

    A page's own settings are not named: its variants differ in few of them, and the user has chosen none.
    """
    for row, values in conflicts(case, "unread"):
        if _parsed(row.setting)[0][0] in given:
            yield f"{_as_typed(case, row.setting)} is not read: {row.reason.format(**values)}"


def reasons(case: Case, settings: Collection[str] | None = None) -> Iterator[str]:
    """Yield why a recipe does not train with its layout and its DeepSpeed file, by all rows or those of `settings`."""
    for row, values in conflicts(case, "run"):
        if settings is None or row.setting in settings:
            yield row.reason.format(**values)


def conflicts(case: Case, moment: Moment) -> Iterator[tuple[Row, Values]]:
    """Yield the rows of a moment that refuse a case, with the values that their texts name."""
    for uses, setting, rows in _blocks(moment):
        if not uses(case):
            continue
        technique = setting.removeprefix("layout.").removesuffix(">1")
        for row, holds in rows:
            if values := COMPUTED[row.when](case, technique) if holds is None else holds(case):
                method, file = case.recipe.method, case.file
                known = {"method": method.name, "title": method.title, "examples": method.examples}
                known |= {"whole_loss": method.whole_loss or ""}
                known |= {"stage": file.stage, "partition_size": file.partition_size} if file else {}
                yield row, known if values is True else {**known, **values}


@cache
def _blocks(moment: Moment) -> list[tuple[Test, str, list[tuple[Row, Test | None]]]]:
    """Return a moment's rows by setting, with the tests of the setting and of each row (None: in `COMPUTED`).

    The planner reads the table for every candidate: conditions are parsed once, and a setting is tested once.
    """
    blocks = itertools.groupby((row for row in TABLE if row.moment == moment), lambda row: row.setting)
    return [
        (_test(setting), setting, [(row, None if row.when in COMPUTED else _test(row.when)) for row in rows])
        for setting, rows in blocks
    ]


def beside(key: str) -> Iterator[str]:
    """Yield the settings that a key cannot be combined with, each with the reason: a line of `--help KEY`."""
    for row in TABLE:
        if row.moment != "unread" and row.when not in COMPUTED and "{" not in row.reason:
            for one, other in ((row.setting, row.when), (row.when, row.setting)):
                if _parsed(one)[0][0] == key:
                    named = other.replace("file.", "the DeepSpeed file's ")
                    (trait, operator, text), *more = _parsed(other)
                    if trait.startswith("method.") and not more:
                        fits, of = _comparison(operator, text), attrgetter(trait.removeprefix("method."))
                        named = "method " + ", ".join(name for name, kind in METHODS.items() if fits(of(kind())))
                    yield f"{one} with {named}: {row.reason}"


def _as_typed(case: Case, condition: str) -> str:
    key = _parsed(condition)[0][0]
    if key.startswith("file."):
        return f"deepspeed={case.file.name}"
    if key.startswith("method."):
        return f"method={case.recipe.method.name}"
    value = case.value(key)
    if value is None:
        return f"without {key}"
    return "adapters" if is_dataclass(value) else f"{key}={typed(value)}"


@cache
def _parsed(condition: str) -> tuple[tuple[str, str, str], ...]:
    """Return the keys, operators and values of a condition's parts."""
    parts = (re.fullmatch(r"([\w.]+)(?:(!=|[=<>])(.+))?", part) for part in condition.split(" and "))
    return tuple((part[1], part[2] or "", part[3] or "") for part in parts if part)


@cache
def _test(condition: str) -> Test:
    """Return a function that tests a condition on a case."""
    parts = [(_getter(key), _comparison(operator, text)) for key, operator, text in _parsed(condition)]
    if len(parts) == 1:
        ((value, holds),) = parts
        return lambda case: holds(value(case))
    return lambda case: all(holds(value(case)) for value, holds in parts)


@cache
def _getter(key: str) -> Callable[[Case], Any]:
    section, _, name = key.rpartition(".")
    if section == "file":
        return lambda case: getattr(case.file, name)
    if section.startswith("file."):
        block = section.removeprefix("file.")
        return lambda case: found.get(name) if isinstance(found := case.file.content.get(block), Mapping) else None
    if section in ("", "layout", "model", "data", "method"):  # every recipe has these
        of_recipe = attrgetter(key)
        return lambda case: of_recipe(case.recipe)

    def value(case: Case) -> Any:
        method = case.recipe.method
        found = method if method.name == section else getattr(case.recipe, section, None)
        return MISSING if found is None else getattr(found, name)

    return value


def _comparison(operator: str, text: str) -> Callable[[Any], bool]:
    """Return a function that compares a value with a text: of numbers the size, of other values what is typed."""
    number = float(text) if text.replace(".", "", 1).isdigit() else None
    word = {"true": True, "false": False, "none": None}.get(text, text)

    def equal(value: object) -> bool:
        same_size = number is not None and not isinstance(value, bool) and value == number
        return value is word or value == text or same_size

    if not operator:
        return lambda value: value is not MISSING and bool(value)
    if operator in "<>":
        assert number is not None, text
        larger = operator == ">"
        return lambda value: type(value) in (int, float) and (value > number if larger else value < number)
    return equal if operator == "=" else lambda value: value is not MISSING and not equal(value)
