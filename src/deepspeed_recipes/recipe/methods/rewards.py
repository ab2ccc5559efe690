"""Reads a recipe's reward functions (`FILE.py:FUNCTION`, comma-separated) and their weights."""

from .. import own_code
from ..errors import UserError
from ..own_code import Function

EXAMPLE = "reward=src/deepspeed_recipes/samples/rewards.py:exact_match"


def functions(reward: str | None) -> list[Function]:
    """Return the functions that the recipe's `reward` names.

    Raises:
        UserError: `reward` is empty or not of the form FILE.py:FUNCTION.
    """
    found = own_code.functions("reward", reward)
    if not found:
        raise UserError(f"reward: GRPO needs a function that scores an answer, FILE.py:FUNCTION; e.g. {EXAMPLE}.")
    return found


def weights(reward: str | None, reward_weights: str | None) -> list[float]:
    """Return the weight of each function.

    Raises:
        UserError: there is not exactly one finite number per function.
    """
    named = functions(reward)
    if reward_weights is None:
        return [1.0] * len(named)
    try:
        found = [float(weight) for weight in reward_weights.split(",")]
    except ValueError:
        found = []
    if len(found) != len(named) or any(abs(weight) == float("inf") or weight != weight for weight in found):
        raise UserError(
            f"grpo.reward_weights={reward_weights}: reward names {len(named)} functions, so {len(named)} numbers are "
            f"expected, separated by commas ({','.join(['1'] * len(named))})."
        )
    return found
