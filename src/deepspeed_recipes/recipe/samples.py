"""The models and data that ship with the project, and the names of roles and fields in conversations."""

from .project import SAMPLES
from .recipe import Data

TINY_MODEL = str(SAMPLES / "tiny_model")
"""A Qwen3 with 3M parameters, made and pre-trained for this project."""
TINY_TEACHER = str(SAMPLES / "tiny_teacher")
"""The tiny model after `tiny full`: it reads notices and answers with JSON."""
TINY_STUDENT = str(SAMPLES / "tiny_student")
"""Two of the tiny model's four layers, narrowed, 1M parameters; its answers are almost random until it is trained."""

HALF_TRAINED = str(SAMPLES / "half_trained_model")
"""The tiny model after a short supervised fine-tune: its answers have the right form and are often wrong."""
TINY_VISION = str(SAMPLES / "sight" / "model")
"""A LLaVA with 0.5M parameters, made and pre-trained for this project: it describes drawn images."""
REWARDS = str(SAMPLES / "rewards.py")
"""Functions that score an answer."""

CHAT = Data(path=f"{SAMPLES}/extract/train.jsonl", validation=f"{SAMPLES}/extract/held_out.jsonl")
"""Sentences to turn into JSON, as conversations."""
PREFERENCES = Data(
    path=f"{SAMPLES}/preferences/train.jsonl",
    validation=f"{SAMPLES}/preferences/held_out.jsonl",
    metric="preference_accuracy",
)
"""The right JSON and a plausible mistake, for the task of `CHAT`."""
JUDGED = Data(
    path=f"{SAMPLES}/judged/train.jsonl", validation=f"{SAMPLES}/judged/held_out.jsonl", metric="judgement_accuracy"
)
"""Answers for the task of `CHAT`, half of them with a mistake, each labelled true or false."""
SIGHT = Data(path=f"{SAMPLES}/sight/reading/train.parquet", validation=f"{SAMPLES}/sight/reading/held_out.parquet")
"""Questions about small images of dials, bar charts and receipts, as conversations with images."""
LABELLED = Data(path=f"{SAMPLES}/labelled/train.jsonl", validation=f"{SAMPLES}/labelled/held_out.jsonl")
"""Notices like those of `CHAT`, each labelled with its topic."""
MATCHING = Data(path=f"{SAMPLES}/matching/train.jsonl", validation=f"{SAMPLES}/matching/held_out.jsonl")
"""Facts from a notice, and the notice that a search for them should find."""
TEXT = Data(path=f"{SAMPLES}/text/train.jsonl", validation=f"{SAMPLES}/text/held_out.jsonl")
"""Raw text."""


ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response", "ipython"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
}
"""Names of roles in use, and the role that each means; `call`: an assistant's turn that holds a tool call as JSON."""
REASONING = ("reasoning_content", "reasoning", "thinking", "thought")
"""The fields of a turn that may hold its reasoning; chat templates read one or two of them."""
