"""The training methods, each with the functions of `TrainingMethod`: a module named like the recipe's `method`.

Those on pairs of answers differ in a loss and a setting or two, and share `preferences.py`.

Continued pre-training is supervised fine-tuning with a loss on every token.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from ...recipe.files import Json
from ...recipe.recipe import Recipe

if TYPE_CHECKING:  # the launcher reads `distillation/vocabulary.py`, and imports no torch
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase, Trainer, TrainingArguments

    from ..data.load import Datasets
    from ..trainer import Parts, RunContext


PAIRS = ("dpo", "orpo", "simpo", "reward")
"""The methods in `preferences.py`."""


class TrainingMethod(Protocol):
    """The functions of a method; `sft` also has `answer`, which stores a few answers of each run."""

    def arguments(self, common: Json, recipe: Recipe, /) -> "TrainingArguments":
        """Return the Trainer's arguments, of the method's own kind; `common` are those of every method."""

    def datasets(self, recipe: Recipe, tokenizer: "PreTrainedTokenizerBase", /) -> "Datasets":
        """Return the training and held-out data."""

    def trainer(self, context: "RunContext", parts: "Parts", /) -> "Trainer":
        """Return the Trainer, with `RunHooks`."""

    def metric(self, trainer: "Trainer", examples: "Dataset", /) -> dict[str, float]:
        """Return the method's own scores of held-out examples, by name."""


if TYPE_CHECKING:  # at run time only the recipe's own method is imported
    from . import classify, distill, embed, grpo, kto, preferences, sft

    CHECKED: tuple[TrainingMethod, ...] = (classify, distill, embed, grpo, kto, sft, *preferences.METHODS.values())


def method(name: str) -> TrainingMethod:
    """Return a method: its module, or one of the methods on pairs."""
    if name in PAIRS:
        from . import preferences

        return preferences.METHODS[name]
    return cast(TrainingMethod, import_module(f".{'sft' if name == 'pretrain' else name}", __package__))
