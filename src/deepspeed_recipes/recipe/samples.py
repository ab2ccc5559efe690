"""The data that ships with the project, so that the commands of every page work the first time."""

from .project import SAMPLES
from .recipe import Data

TINY_MODEL = str(SAMPLES / "tiny_model")
"""A Qwen3 of 3M parameters, made and pre-trained here."""
TINY_TEACHER = str(SAMPLES / "tiny_teacher")
"""The same after `tiny full`: it reads notices and answers with JSON."""
TINY_STUDENT = str(SAMPLES / "tiny_student")
"""Two of its four layers, narrowed, 1M parameters: knows next to nothing until it is trained."""

HALF_TRAINED = str(SAMPLES / "half_trained_model")
"""The same after a short supervised fine-tune: it answers in the right form, and often wrongly."""
TINY_VISION = str(SAMPLES / "sight" / "model")
"""A LLaVA of 0.5M parameters, made and pre-trained here: it describes drawn pictures."""
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
SIGHT = Data(path=f"{SAMPLES}/sight/reading/train.parquet", validation=f"{SAMPLES}/sight/reading/held_out.parquet")
"""Questions about small pictures of dials, bar charts and receipts, as conversations with pictures."""
LABELLED = Data(path=f"{SAMPLES}/labelled/train.jsonl", validation=f"{SAMPLES}/labelled/held_out.jsonl")
"""Notices of the same world, each labelled with what it is about."""
MATCHING = Data(path=f"{SAMPLES}/matching/train.jsonl", validation=f"{SAMPLES}/matching/held_out.jsonl")
"""Some facts of a notice, and the notice that they should find."""
TEXT = Data(path=f"{SAMPLES}/text/train.jsonl", validation=f"{SAMPLES}/text/held_out.jsonl")
"""Raw text."""
