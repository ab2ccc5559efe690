"""The data that ships with the project, so that the commands of every page work the first time."""

from .project import SAMPLES
from .recipe import Data

TINY_MODEL = str(SAMPLES / "tiny_model")
"""A Qwen3 of 3M parameters, made and pre-trained here."""

HALF_TRAINED = str(SAMPLES / "half_trained_model")
"""The same after a short supervised fine-tune: it answers in the right form, and often wrongly."""
REWARDS = str(SAMPLES / "rewards.py")
"""Functions that score an answer."""

CHAT = Data(path=f"{SAMPLES}/extract/train.jsonl", validation=f"{SAMPLES}/extract/held_out.jsonl")
"""Sentences to turn into JSON, as conversations."""
PREFERENCES = Data(
    path=f"{SAMPLES}/preferences/train.jsonl",
    validation=f"{SAMPLES}/preferences/held_out.jsonl",
    metric="preference_accuracy",
)
"""The right JSON beside a plausible mistake, for the same task."""
JUDGED = Data(
    path=f"{SAMPLES}/judged/train.jsonl", validation=f"{SAMPLES}/judged/held_out.jsonl", metric="judgement_accuracy"
)
"""Answers for the same task, half of them with a mistake, each labelled true or false."""
TEXT = Data(path=f"{SAMPLES}/text/train.jsonl", validation=f"{SAMPLES}/text/held_out.jsonl")
"""Raw text."""
