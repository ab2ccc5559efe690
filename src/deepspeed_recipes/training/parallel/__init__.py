"""The ways in which a model is distributed over ranks.

Two modules hold a model, `whole.py` and `pipeline.py`, with the same functions:

    check(recipe, tokenizer)                 refuse a model that this module would train differently
    load(recipe, tokenizer)                  this rank's model, ready for the Trainer
    outline(recipe, model)                   a model to count parameters and operations on
    step(trainer, ordinary, inputs, items)   forward and backward pass of one micro-batch; returns its loss
    logits(trainer, tokens)                  the logits of one sequence, on every rank
    measure(trainer, sequences)              loss per token on held-out data, and other scores from the same passes
    save(trainer, folder)                    an ordinary Hugging Face folder, or a PEFT adapter

Both call `tensor`, `sequence` and `expert`.
"""

from types import ModuleType

from ...recipe.recipe import Layout
from . import pipeline, whole


def implementation(layout: Layout) -> ModuleType:
    """Return the module for a layout: `whole` or `pipeline`."""
    return pipeline if layout.pipeline > 1 else whole
