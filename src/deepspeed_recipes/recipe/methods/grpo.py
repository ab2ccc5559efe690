"""GRPO and RLOO: their settings, their reward functions, and the combinations that they refuse."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from .. import own_code
from ..bounds import Bounds, Several
from ..errors import UserError
from ..own_code import Function
from .method import Method, check_room

EXAMPLE = "reward=src/deepspeed_recipes/samples/rewards.py:exact_match"


def reward_functions(reward: str | None) -> list[Function]:
    """Return the functions that the recipe's `reward` names."""
    found = own_code.functions("reward", reward)
    if not found:
        raise UserError(f"reward: GRPO needs a function that scores an answer, FILE.py:FUNCTION; e.g. {EXAMPLE}.")
    return found


def weights_of(reward: str | None, reward_weights: str | None) -> list[float]:
    """Return the weight of each function; there must be exactly one finite number for each."""
    named = reward_functions(reward)
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


@dataclass(frozen=True)
class Grpo(Method):
    """Group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300), and RLOO, run by TRL."""

    name = "grpo"
    title = "GRPO"
    examples = "prompts"
    reference = True
    curve = "GRPO loss per answer"
    whole_loss = "GRPO already computes its loss in tiles"
    rollouts = True
    own_loss = True
    excludes: ClassVar[Mapping[str, str]] = {
        "tensor": "tensor parallelism is tested with the loss of all tokens, and not with GRPO's",
        "sequence": "GRPO generates answers, and a rank that has a part of each sequence cannot",
        "pipeline": "GRPO generates answers, and a pipeline's stages only train",
        "expert": "expert parallelism is tested with the loss of all tokens, and not with GRPO's",
    }

    group_size: Annotated[int, Bounds(least=2)] = 8
    """Answers per prompt, which are compared with each other; `global_batch_size` counts answers."""
    loss: Literal["grpo", "dapo", "dr_grpo", "rloo"] = "grpo"
    """Loss over the answers. `grpo`, the paper's, weighs every answer the same; `dapo` (arXiv:2503.14476) weighs every
    token of a step the same; `dr_grpo` (arXiv:2503.20783) divides by the longest allowed length and works best with
    `scale=none`; `rloo` (arXiv:2402.14740) takes whole answers, compares each with the mean of the others, and adds the
    KL divergence to the reward."""
    scale: Literal["group", "batch", "none"] = "group"
    """Divisor of the advantages: the standard deviation of the group's rewards (the paper), that of all rewards of a
    step, or none. RLOO uses none."""
    beta: Annotated[float, Bounds(least=0)] = 0.0
    """Weight of the KL divergence from the model before training: 0.04 in the paper; 0 needs no second model."""
    epsilon: Annotated[float, Bounds(above=0, usual=0.2)] = 0.2
    """Largest relative change of the likelihood of a token (RLOO: of an answer) since its rollout before clipping."""
    epsilon_high: Annotated[float | None, Bounds(above=0, usual=0.28)] = None
    """Upper clipping bound, if it differs from `epsilon`: 0.28 in DAPO."""
    iterations: Annotated[int, Bounds(least=1)] = 1
    """Updates per rollout; the paper's mu. With 1 nothing is ever clipped."""
    temperature: Annotated[float, Bounds(above=0, usual=1)] = 1.0
    """Sampling temperature: a higher value explores more."""
    max_new_tokens: Annotated[int, Bounds(least=1)] = 256
    """Longest answer in tokens; together with its prompt it has to fit into `sequence_length`."""
    mask_truncated: bool = False
    """Leave answers that reach `max_new_tokens` out of the loss (DAPO)."""
    reward_weights: Annotated[str | None, Several()] = None
    """Weights of the functions in `reward`, separated by commas (`1,0.2`). None gives each function the weight 1."""
    reward_seconds: Annotated[float, Bounds(above=0, most=86_400, usual=5)] = 5.0
    """Time limit of the reward functions for one answer, in seconds; an answer that takes longer has no reward."""
    gather: bool = True
    """Under ZeRO-3, gather the whole weights on every rank while it generates. `false` gathers layer by layer for every
    token, which is slow, for models that do not fit."""
    vllm: str | None = None
    """Address of a vLLM server that generates the answers (`http://HOST:8000`), on a GPU of its own. Start it with
    `VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "nccl"}' --logprobs-mode
    processed_logprobs --max-logprobs -1`. The transfer of weights over NCCL is not tested by this project."""
    vllm_check_steps: Annotated[int, Bounds(least=0)] = 50
    """Steps between comparisons of the server's log-probabilities with the model's, from the first transfer of weights;
    a server with other weights ends the run. 0 never compares."""

    @property
    def asks_reference(self) -> bool:
        """True if the loss has a KL term."""
        return self.beta != 0

    def judged_by(self, chosen: str) -> str:
        """Return the mean reward, or `data.metric` if it names another metric than the loss."""
        return "reward" if chosen == "loss" else chosen

    def check(self, recipe: Any) -> None:
        """Refuse groups, lengths, bounds and reward functions that contradict each other."""
        weights_of(recipe.reward, self.reward_weights)
        answers = recipe.global_batch_size
        if answers % self.group_size:
            unit = math.lcm(self.group_size, recipe.micro_batch_size)
            raise UserError(
                f"grpo.group_size={self.group_size}: global_batch_size={answers} answers do not make whole groups; "
                f"use global_batch_size={-(-answers // unit) * unit}, or a group_size that divides {answers}."
            )
        check_room("grpo", self.max_new_tokens, recipe.sequence_length)
        if self.epsilon_high is not None and self.epsilon_high < self.epsilon:
            raise UserError(f"grpo.epsilon_high={self.epsilon_high}: must be at least grpo.epsilon={self.epsilon}.")
