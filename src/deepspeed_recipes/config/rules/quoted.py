"""Rules about text: a number or a switch in quotes."""

from collections.abc import Iterator

from .. import schema
from ..rule import FAILS_LATER, TRUE_TEXTS, WRONG, Config, Edit, Facts, Hit, Rule, shown
from ..schema import fits
from .kinds import known_keys


def _text_for_number(config: Config, facts: Facts) -> Iterator[Hit]:
    for path, value, entry in known_keys(config):
        default = entry.get("default")
        untyped_number = "type" not in entry and isinstance(default, (int, float))
        if not untyped_number or isinstance(default, bool) or not isinstance(value, (str, list, dict)):
            continue
        if value == "auto" or not schema.accepts(entry, value):
            continue
        number = _as_number(value)
        edits = () if number is None else (Edit("set", path, number),)
        fix = f"write {number if number is not None else default}"
        yield Hit(
            path, value, f"{shown(value)} is accepted as it is and fails later, where a number is needed", fix, edits
        )


def _as_number(value: object) -> int | float | None:
    try:
        number = float(value) if isinstance(value, str) else None
    except ValueError:
        return None
    if number is None or number - number != 0:  # not for inf and nan
        return None
    return int(number) if number == int(number) and "." not in str(value) else number


def _text_for_truth(config: Config, facts: Facts) -> Iterator[Hit]:
    for path, value, entry in known_keys(config):
        if "type" in entry or not isinstance(entry.get("default"), bool) or not isinstance(value, str):
            continue
        if value.lower() in ("false", "no", "off", "0") and schema.accepts(entry, value):
            what = f"the string {shown(value)} counts as true, like every string that is not empty"
            yield Hit(path, value, what, "write false", (Edit("set", path, False),))


_READ_BY_TRAINER = (
    ("zero_optimization", "stage"),
    ("zero_optimization", "stage3_gather_16bit_weights_on_model_save"),
    ("bf16", "enabled"),
    ("fp16", "enabled"),
)
"""Typed keys that transformers or accelerate look up themselves, without pydantic."""


def _text_for_trainer(config: Config, facts: Facts) -> Iterator[Hit]:
    for path in _READ_BY_TRAINER if facts.trainer == "hf" else ():
        value = config.text(*path)
        entry = schema.load()["root"]["keys"][path[0]]["section"]["keys"][path[1]]
        if value in (None, "auto") or not fits(entry["type"], value):
            continue
        right = int(float(value)) if path[1] == "stage" else value.lower() in TRUE_TEXTS
        what = f"DeepSpeed reads {shown(right)}, but the Trainer compares the string {shown(value)}"
        yield Hit(path, value, what, f"write {shown(right)}", (Edit("set", path, right),))


RULES = (
    Rule(
        "text-for-number",
        "error",
        FAILS_LATER,
        "\"'>' not supported between instances of 'str' and 'float'\" in the first optimizer step",
        "The number is in quotes; sections without types keep it as a string until it is used.",
        "Remove the quotes.",
        _text_for_number,
    ),
    Rule(
        "text-for-truth",
        "error",
        WRONG,
        'a switch set to the string "false" is on',
        "Outside the typed sections DeepSpeed tests values for emptiness, and only the empty string is empty.",
        "Write false without quotes.",
        _text_for_truth,
    ),
    Rule(
        "text-for-trainer",
        "error",
        WRONG,
        '"Please correct the following DeepSpeed config values that mismatch TrainingArguments"; or the Trainer '
        "does not notice ZeRO-3, and every rank loads the whole model",
        'DeepSpeed\'s typed sections understand "3" and "true"; the Trainer and accelerate look these keys up '
        "themselves, where a string is neither 3 nor true.",
        "Remove the quotes.",
        _text_for_trainer,
    ),
)
