"""All rules of the linter, one module per topic, in the order of their findings; `rules.toml` has their texts."""

from ..rule import Rule
from . import batch, hf_trainer, keys, kinds, machine, optimizer, parallel, precision, zero

_MODULES = (keys, kinds, batch, zero, optimizer, precision, parallel, hf_trainer, machine)
RULES = tuple(one for module in _MODULES for one in vars(module).values() if isinstance(one, Rule))
