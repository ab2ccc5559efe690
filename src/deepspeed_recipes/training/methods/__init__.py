"""The training methods: one module each, named like the recipe's `method`, with the same functions.

arguments(common, recipe)                                       the Trainer's arguments, of the method's own kind
datasets(recipe, tokenizer)                                     the training and held-out data
trainer(context, model, arguments, dataset, tokenizer)          the Trainer, with `RunHooks`
metric(trainer, examples)                                       the method's own scores by name, if it has any
"""

from importlib import import_module
from types import ModuleType


def method(name: str) -> ModuleType:
    """Return the module of a method."""
    return import_module(f".{name}", __package__)
