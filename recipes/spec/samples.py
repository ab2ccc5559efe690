"""The data that ships with the project, so that the commands of every page work the first time."""

from recipes.spec.recipe import Data

_FOLDER = "recipes/samples"

CHAT = Data(path=f"{_FOLDER}/extract/train.jsonl", validation=f"{_FOLDER}/extract/held_out.jsonl")
"""Sentences to turn into JSON, as conversations."""
PREFERENCES = Data(
    path=f"{_FOLDER}/preferences/train.jsonl",
    validation=f"{_FOLDER}/preferences/held_out.jsonl",
    metric="preference_accuracy",
)
"""The right JSON beside a plausible mistake, for the same task."""
TEXT = Data(path=f"{_FOLDER}/text/train.jsonl", validation=f"{_FOLDER}/text/held_out.jsonl")
"""Raw text."""
