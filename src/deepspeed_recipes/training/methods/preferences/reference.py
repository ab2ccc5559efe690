"""The model before training, for the methods that compare with it."""

from collections.abc import Callable
from typing import Any

from ....recipe.recipe import Recipe
from ...model import load
from ...trainer import RunContext, RunHooks


def of_recipe(recipe: Recipe) -> Any:
    """Return the model before training, or None with adapters: without them, the model is its own reference."""
    return load.load_model(recipe) if recipe.method.asks_reference and recipe.lora is None else None


def with_reference(kind: type[RunHooks]) -> Callable[..., RunHooks]:
    """Return a method's `trainer` for a class of TRL's, with a reference model where all weights are trained.

    With adapters the model without them is the reference. TRL would load a second model by itself, but not as the run
    loads the first: also from pickles, and under ZeRO-3 with rotary frequencies rounded to the training dtype.
    """

    def trainer(context: RunContext, model: Any, arguments: Any, dataset: Any, tokenizer: Any) -> RunHooks:
        return kind.of(context, model, arguments, dataset, tokenizer, ref_model=of_recipe(context.recipe))

    return trainer
