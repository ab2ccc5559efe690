"""Rules about values: wrong types, unknown words, quoted numbers and switches, and "auto" that is not filled."""

import difflib
import math
from collections.abc import Iterator

from ...recipe.files import Json
from .. import schema
from ..read import Key
from ..resolve import Numbers, fillings
from ..rule import FAILS_LATER, REJECTED, TRUE_TEXTS, WRONG, Config, Edit, Facts, Hit, dotted, rule, shown
from ..schema import describe, fits

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""Batch sizes depend on each other, so that rules/batch.py covers them."""

FILLED = tuple(fillings(Numbers(hidden_size=1, max_steps=1)))
"""The keys that the Trainer fills, through accelerate; a test compares them with a real Trainer."""


def known_keys(config: Config) -> Iterator[tuple[Key, object, Json]]:
    """Yield the known keys that DeepSpeed reads, without batch sizes, with their values and schema entries."""
    unread: set[Key] = set()
    if config.get("bf16") is not None:
        unread.add(("bfloat16",))
    if config.get("optimizer", "type") is None:
        unread.add(("optimizer", "params"))
    for path, value, node in schema.walk(config.value):
        entry = node["keys"].get(path[-1])
        read = path[:1] not in unread and path[:2] not in unread
        if entry is not None and read and (len(path) > 1 or path[0] not in BATCH_KEYS):
            yield path, value, entry


_KINDS = {
    "list of text": "a list of strings",
    "true": "true or false",
    "fraction": "a number",
    "text": "a string",
    "null": "null",
}
"""Kinds of values of keys without a type, in words."""


@rule("wrong-type", "error", REJECTED)
def _wrong_type(config: Config, facts: Facts) -> Iterator[Hit]:
    for path, value, entry in known_keys(config):
        if value == "auto" and "type" in entry:
            continue
        if "type" in entry and not fits(entry["type"], value):
            words = [word for word in entry["type"].get("values", ()) if isinstance(word, str)]
            close = difflib.get_close_matches(str(value).lower(), words, n=1, cutoff=0.6)
            fix = f"did you mean {shown(close[0])}?" if close else f"write {describe(entry['type'])}"
            plain = close and str(value).strip().lower() == close[0]  # "CPU": only its letters' case differs
            edits = (Edit("set", path, close[0]),) if plain else ()
            yield Hit(path, value, f"{shown(value)} is not {describe(entry['type'])}", fix, edits)
        elif not schema.accepts(entry, value):
            loads = entry["loads"]
            accepted = next((words for kind, words in _KINDS.items() if kind in loads), "nothing; remove the key")
            if "texts" in entry:
                accepted = " | ".join(shown(text) for text in entry["texts"][:8])
            elif "section" in entry or "object" in loads:
                accepted = "an object"
            yield Hit(path, value, f"DeepSpeed does not accept {shown(value)} here", f"write {accepted}")


_NEEDED = {
    ("data_efficiency", "data_sampling", "curriculum_learning"): "curriculum_metrics",
    ("data_efficiency", "data_sampling", "dynamic_batching"): "max_tokens",
}


@rule("data-sampling-without-settings", "error", REJECTED)
def _switched_on_empty(config: Config, facts: Facts) -> Iterator[Hit]:
    for path, needed in _NEEDED.items():
        if config.get(*path, "enabled") and not config.has(*path, needed):
            yield Hit((*path, "enabled"), True, f"needs `{dotted((*path, needed))}`", f"add `{needed}`")


@rule("steps-per-print-0", "error", FAILS_LATER)
def _steps_per_print(config: Config, facts: Facts) -> Iterator[Hit]:
    path = ("steps_per_print",)
    value = config.get(*path)
    if facts.trainer == "plain" and isinstance(value, (int, float)) and value == 0:
        what = "the engine divides the number of steps by it after every step"
        yield Hit(path, value, what, "write how often to report; for never remove it, or write null")


@rule("unknown-dtype", "error", FAILS_LATER)
def _dtype(config: Config, facts: Facts) -> Iterator[Hit]:
    words = schema.load()["dtypes"]
    for name in ("grad_accum_dtype", "param_dtype", "buffer_dtype"):
        value = config.get("data_types", name)
        if value is not None and value != "auto" and value not in words:
            short = [word for word in words if "." not in word]
            yield Hit(("data_types", name), value, f"{shown(value)} is not a dtype", f"write {' | '.join(short)}")


def _auto_paths(config: Config) -> Iterator[Key]:
    pending: list[tuple[Key, object]] = [((), config.value)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, dict):
            pending.extend(((*path, name), inner) for name, inner in reversed(value.items()))
        elif value == "auto":
            yield path


@rule("auto-without-trainer", "error", WRONG)
def _auto_plain(config: Config, facts: Facts) -> Iterator[Hit]:
    if facts.trainer != "plain":
        return
    for path in _auto_paths(config):
        entry = schema.entry(path)
        default = entry.get("default")
        if default == "auto" or dotted(path) in ("datastates_ckpt", "scheduler.type", "optimizer.type"):
            continue
        if path[-1] in BATCH_KEYS:
            continue  # DeepSpeed rejects it: rules/batch.py
        # pydantic reads a field with a type, and takes its default for "auto".
        effect = f"is read as {shown(default)}" if "type" in entry else "stays the string `auto`, which nothing can use"
        yield Hit(path, "auto", f'"auto" has a meaning only for the Hugging Face Trainer; here it {effect}')


@rule("auto-not-filled", "error", FAILS_LATER)
def _auto_unfilled(config: Config, facts: Facts) -> Iterator[Hit]:
    if facts.trainer != "hf":
        return
    for path in _auto_paths(config):
        if dotted(path) not in FILLED:
            own = schema.entry(path).get("default") == "auto"
            fix = "remove it; it is the default" if own else "write the value"
            edits = (Edit("remove", path),) if own else ()
            yield Hit(path, "auto", f"the Trainer has no value for `{dotted(path)}` and stops", fix, edits)
        elif path[-1] == "device":
            what = f"the Trainer writes none, unless accelerate launch has --{path[-2]}_device: nothing is offloaded"
            yield Hit(path, "auto", what, 'write "cpu"', severity="warning")


@rule("text-for-number", "error", FAILS_LATER)
def _text_for_number(config: Config, facts: Facts) -> Iterator[Hit]:
    for path, value, entry in known_keys(config):
        default = entry.get("default")
        untyped_number = "type" not in entry and isinstance(default, (int, float))
        if not untyped_number or isinstance(default, bool) or not isinstance(value, (str, list, dict)):
            continue
        if value == "auto" or not schema.accepts(entry, value):
            continue
        try:
            number = float(value) if isinstance(value, str) else math.nan
        except ValueError:
            number = math.nan
        if number.is_integer() and "." not in str(value):
            number = int(number)
        finite = math.isfinite(number)
        edits = (Edit("set", path, number),) if finite else ()
        fix = f"write {number if finite else default}"
        yield Hit(
            path, value, f"{shown(value)} is accepted as it is and fails later, where a number is needed", fix, edits
        )


@rule("text-for-truth", "error", WRONG)
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
"""Typed keys that transformers and accelerate also read, without pydantic."""


@rule("text-for-trainer", "error", WRONG)
def _text_for_trainer(config: Config, facts: Facts) -> Iterator[Hit]:
    for path in _READ_BY_TRAINER if facts.trainer == "hf" else ():
        value = config.text(*path)
        entry = schema.load()["root"]["keys"][path[0]]["section"]["keys"][path[1]]
        if value in (None, "auto") or not fits(entry["type"], value):
            continue
        right = int(float(value)) if path[1] == "stage" else value.lower() in TRUE_TEXTS
        what = f"DeepSpeed reads {shown(right)}, but the Trainer compares the string {shown(value)}"
        yield Hit(path, value, what, f"write {shown(right)}", (Edit("set", path, right),))
