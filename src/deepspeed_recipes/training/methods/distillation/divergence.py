"""Divergences of a student's distribution over the next token from a teacher's, per token.

Agarwal et al. 2023 (arXiv:2306.13649), section 2. Everything is in logarithms, natural, fp32, [tokens, outcomes].
"""

import math

import torch

from ....recipe.methods import Distill
from ....recipe.recipe import Recipe


def per_token(student: torch.Tensor, teacher: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Return the divergence that the recipe names, at its temperature, [tokens], in nats.

    Args:
        student: its log-probabilities.
        teacher: its log-probabilities of the same outcomes.
        recipe: for `distill.loss` and `distill.beta`.
    """
    distill = Distill.of(recipe)
    if distill.loss == "forward_kl":
        return _kl(teacher, student)
    if distill.loss == "reverse_kl":
        return _kl(student, teacher)
    beta = distill.beta
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log(1 - beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return KL(one || other)."""
    return (one.exp() * (one - other)).sum(-1)


def of_outcomes(log_probs: torch.Tensor, likeliest: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of some tokens and, as one more outcome, of all others, [tokens, k + 1].

    A divergence of these is at most that of the whole distributions, and equal where `likeliest` is all tokens. Without
    the last outcome the student could put its probability on tokens that the loss does not cover.

    Args:
        log_probs: of the whole vocabulary, [tokens, vocabulary].
        likeliest: numbers of the tokens, [tokens, k].
    """
    chosen = log_probs.gather(-1, likeliest)
    if likeliest.shape[-1] == log_probs.shape[-1]:
        return chosen
    others = log_probs.scatter(-1, likeliest, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([chosen, others], dim=-1)
