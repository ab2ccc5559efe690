"""All rules of the linter, one module per topic, in the order of their findings."""

from ..rule import Rule
from . import (
    batch,
    hf_trainer,
    keys,
    kinds,
    machine,
    offload,
    optimizer,
    parallel,
    precision,
    syntax,
    zero,
)

RULES: tuple[Rule, ...] = (
    *syntax.RULES,
    *keys.RULES,
    *kinds.RULES,
    *batch.RULES,
    *zero.RULES,
    *offload.RULES,
    *optimizer.RULES,
    *precision.RULES,
    *parallel.RULES,
    *hf_trainer.RULES,
    *machine.RULES,
)
