"""Reward functions to copy: each gets an answer and the fields of its example, and returns a number.

    python scripts/launch.py tiny grpo reward=src/deepspeed_recipes/samples/rewards.py:exact_match
    python scripts/launch.py tiny grpo reward=my_rewards.py:right,my_rewards.py:short grpo.reward_weights=1,0.2

`answer` holds all that the model has written, also a thinking model's reasoning; `final` leaves that out. `example`
holds the fields of the example in the data file, `prompt` (its turns), `prompt_text` (the prompt if the file has it as
text) and `expected`, the answer in the file; each is None where it has none. A function with a parameter `completions`
is called as TRL calls it, with lists (of one answer): `def right(prompts, completions, **columns)`. An error, a text, a
NaN or too long a time ends that example: the answer has no reward.
Plain Python, standard library only; a file of yours may import what it likes.
"""

import json
import re
from typing import Any

Example = dict[str, Any]

NUMBER = re.compile(r"(-?\d[\d,]*(?:\.\d+)?)\s*([A-Za-z%°€$£/]+)?")
"""A number in a text, and the unit behind it."""


def final(text: str) -> str:
    """Return what a model says after its reasoning, which ends with `</think>` where there is some."""
    return text.rpartition("</think>")[2].strip()


def exact_match(answer: str, example: Example) -> float:
    """Return 1 for the expected answer, up to white space at its ends and reasoning before it; else 0."""
    return float(final(answer) == final(example["expected"]))


def json_valid(answer: str, example: Example) -> float:
    """Return 1 for one JSON object and nothing around it; else 0."""
    try:
        return float(isinstance(json.loads(final(answer)), dict))
    except (ValueError, RecursionError):
        return 0.0


def same_facts(answer: str, example: Example) -> float:
    """Return which share of the expected JSON object's values the answer has; what it adds counts against it."""
    try:
        said, expected = json.loads(final(answer)), json.loads(final(example["expected"]))
    except (ValueError, RecursionError):
        return 0.0
    if not isinstance(said, dict):
        return 0.0
    right = sum(key in said and said[key] == value for key, value in expected.items())
    return right / len(said.keys() | expected.keys())


def number_and_unit(answer: str, example: Example) -> float:
    """Return 1 where the last number of the answer is the expected one with its unit, 0.5 without the unit; else 0.

    The unit is the example's field `unit`, or what stands behind the number in the expected answer.
    """
    found, wanted = NUMBER.findall(final(answer)), NUMBER.findall(final(example["expected"]))
    if not found or not wanted:
        return 0.0
    (value, unit), (right, right_unit) = found[-1], wanted[-1]
    if float(value.replace(",", "")) != float(right.replace(",", "")):
        return 0.0
    return 1.0 if unit == (example.get("unit") or right_unit) else 0.5


def short(answer: str, example: Example) -> float:
    """Return 1 up to the length of the expected answer, and less the longer the answer is; 0 from twice as long on."""
    longest = len(example["expected"] or "") or 200
    return max(0.0, min(1.0, 2.0 - len(answer) / longest))
