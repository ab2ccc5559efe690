"""Rules about batch sizes: DeepSpeed's arithmetic and the Trainer's additions to it."""

import re
from collections.abc import Iterator

from ...recipe.files import Json
from ..rule import FAILS_LATER, REJECTED, WRONG, Config, Edit, Facts, Hit, rule, shown
from .kinds import BATCH_KEYS

_TRAIN, _MICRO, _ACCUMULATION = BATCH_KEYS
_MISSING = "neither `train_batch_size` nor `train_micro_batch_size_per_gpu` is set"


def _given(config: Config, facts: Facts) -> Json:
    """Return the batch keys that are set; null counts as not set, as it does for DeepSpeed."""
    values = {name: config.get(name) for name in BATCH_KEYS}
    return {name: value for name, value in values.items() if value is not None}


@rule("batch-value", "error", REJECTED)
def _not_positive(config: Config, facts: Facts) -> Iterator[Hit]:
    for name, value in _given(config, facts).items():
        if value == "auto" and facts.trainer == "hf":
            continue
        if not isinstance(value, (int, float)) or value <= 0:
            text = isinstance(value, str) and re.fullmatch(r"0*[1-9]\d{,17}", value)
            edits = (Edit("set", (name,), int(value)),) if text else ()
            fix = f"write {value} without quotes" if text else "write a whole number above 0"
            yield Hit((name,), value, f"{shown(value)} is not a batch size", fix, edits)


@rule("batch-fraction", "warning", WRONG)
def _fraction(config: Config, facts: Facts) -> Iterator[Hit]:
    for name, value in _given(config, facts).items():
        if isinstance(value, bool) or (isinstance(value, float) and value > 0 and not value.is_integer()):
            yield Hit((name,), value, f"{shown(value)} is not a whole number, but DeepSpeed calculates with it")


@rule("batch-missing", "error", REJECTED)
def _missing(config: Config, facts: Facts) -> Iterator[Hit]:
    given = _given(config, facts)
    if _TRAIN not in given and _MICRO not in given:
        edits = (Edit("set", (_MICRO,), "auto"),) if facts.trainer == "hf" else ()
        value = '"auto"' if facts.trainer == "hf" else "1, or as much as fits"
        yield Hit((_MICRO,), None, _MISSING, f'add "{_MICRO}": {value}', edits)


@rule("batch-identity", "error", REJECTED)
def _identity(config: Config, facts: Facts) -> Iterator[Hit]:
    given = _given(config, facts)
    if facts.trainer == "hf":  # which fills "auto"; accelerate adds an accumulation of 1 where the key is absent
        given = {_ACCUMULATION: 1, **{name: value for name, value in given.items() if value != "auto"}}
        if config.get(_ACCUMULATION) == "auto":
            del given[_ACCUMULATION]
    if _TRAIN not in given or not all(isinstance(value, (int, float)) and value > 0 for value in given.values()):
        return
    ranks = facts.world_size
    if ranks is not None:  # DeepSpeed divides a batch by all ranks but those of a pipeline and of a sequence
        ranks = max(1, ranks // facts.sequence_parallel_size // facts.pipeline_stages)
    train, micro, accumulation = given[_TRAIN], given.get(_MICRO), given.get(_ACCUMULATION)
    right = (micro or 1) * (accumulation or 1) * (ranks or 1)
    whole = micro and accumulation and ranks
    if train == right or (not whole and train % right == 0):
        return
    by = "" if config.has(_ACCUMULATION) or facts.trainer == "plain" else " (which accelerate adds)"
    product = f"micro batch {micro or 'any'} x accumulation {accumulation or 'any'}{by}"
    product += "" if ranks is None else f" x {ranks} data-parallel rank{'s' * (ranks != 1)}"
    what = f"{shown(train)} is not {'' if whole else 'a multiple of '}{product}"
    fix = f"remove it, or write {right}" if whole else f"write a multiple of {right}"
    yield Hit((_TRAIN,), train, what, fix)


@rule("accumulation-missing", "warning", WRONG)
def _accumulation_missing(config: Config, facts: Facts) -> Iterator[Hit]:
    if facts.trainer == "hf" and not config.has(_ACCUMULATION):
        what = "an Accelerator of your own accumulates over 1 step; the Trainer over those that TrainingArguments sets"
        asked = (facts.arguments or {}).get(_ACCUMULATION, 1)
        stops = config.get(_TRAIN) == "auto" and asked != 1
        if config.get(_TRAIN) == "auto":  # the Trainer fills in the product with its own accumulation
            what += f"; DeepSpeed refuses {'the run' if stops else 'more than 1'}, as train_batch_size does not fit"
        edits = (Edit("set", (_ACCUMULATION,), "auto"),)
        fix = 'add "gradient_accumulation_steps": "auto"'
        yield Hit((_ACCUMULATION,), None, what, fix, edits, "error" if stops else None)


@rule("train-batch-fixed", "warning", FAILS_LATER)
def _fixed_batch(config: Config, facts: Facts) -> Iterator[Hit]:
    if facts.trainer != "hf":
        return
    given = _given(config, facts)
    if given.get(_TRAIN) not in (None, "auto") and given.get(_MICRO) == "auto":
        what = "a fixed global batch fits only one number of ranks; with any other the Trainer reports a mismatch"
        yield Hit((_TRAIN,), given[_TRAIN], what, 'write "auto"', (Edit("set", (_TRAIN,), "auto"),))
