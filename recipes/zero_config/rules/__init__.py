"""The linter's rules: one tuple per topic, and all of them here in the order in which findings are shown."""

from recipes.zero_config.rule import Rule
from recipes.zero_config.rules import (
    batch,
    keys,
    kinds,
    machine,
    offload,
    optimizer,
    parallel,
    precision,
    syntax,
    trainer,
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
    *trainer.RULES,
    *machine.RULES,
)
