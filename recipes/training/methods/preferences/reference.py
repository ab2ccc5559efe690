"""The model as it was before training, for the methods that compare with it."""

from collections.abc import Callable
from typing import Any

from ...model import load
from ...trainer import RunContext, RunHooks


def with_reference(kind: type[RunHooks]) -> Callable[..., RunHooks]:
    """Return a method's `trainer` for a class of TRL's, with a reference model where all weights are trained.

    With adapters the model is its own reference, without them. TRL would load a second model by itself, but not as
    the run loads the first: also from pickles, and under ZeRO-3 with rotary frequencies rounded to the training dtype.
    """

    def trainer(context: RunContext, model: Any, arguments: Any, dataset: Any, tokenizer: Any) -> RunHooks:
        recipe = context.recipe
        reference = load.load_model(recipe) if recipe.asks_reference and recipe.lora is None else None
        return kind.of(context, model, arguments, dataset, tokenizer, ref_model=reference)

    return trainer
