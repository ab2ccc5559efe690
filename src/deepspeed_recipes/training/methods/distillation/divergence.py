"""The loss of distillation: divergences per token, in tiles of tokens, so that no model's whole logits ever exist.

The divergences are Agarwal et al.'s (2023, arXiv:2306.13649, section 2). Everything is in logarithms, natural, fp32,
[tokens, outcomes].

A tile's logits, its loss and its gradients with respect to the hidden states and the head's weights are computed
together, in the forward pass, and the logits discarded: the head is multiplied once per model and pass, and the
backward pass only scales these gradients. TRL's `ChunkedDivergenceFunction` computes both heads three times, for a
GPU's kernels; it supports neither the cross-entropy nor a cache of the likeliest tokens, and would need a second pass
for either.
"""

import math
from collections.abc import Callable

import torch
from torch.autograd.function import FunctionCtx

from ....recipe.methods import Distill
from ....recipe.recipe import Recipe
from ...model.output_head import Head

ENTRIES = 2**25
"""Logits in a tile: 128 MiB in fp32, which the loss holds about eight times; 262 tokens of a vocabulary of 128,000."""

Compare = Callable[[torch.Tensor, slice], tuple[torch.Tensor, torch.Tensor]]
"""Maps the logits of some tokens, and their slice, to their summed loss and numbers to log, [kinds, tokens]."""


def per_token(student: torch.Tensor, teacher: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Return the divergence that `distill.loss` and `distill.beta` name, at their temperature, [tokens], in nats.

    Both sides are log-probabilities of the same outcomes.
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


def summed(hidden: torch.Tensor, head: Head, compare: Compare) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of `compare`'s loss over tiles of hidden states, [tokens, hidden], and its numbers, detached.

    The head's weights must be gathered.
    """
    return _Tiles.apply(hidden, head, compare, *head.weights)


class _Tiles(torch.autograd.Function):
    """Computes loss and gradients tile by tile."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: torch.Tensor, head: Head, compare: Compare, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wanted = [ctx.needs_input_grad[0], *ctx.needs_input_grad[3:]]
        # In fp32: in bf16 a sum over many tiles would lose the small terms.
        gradients = [
            torch.zeros_like(one, dtype=torch.float32) if needed else None
            for one, needed in zip((hidden, *weights), wanted, strict=True)
        ]
        losses, numbers = [], []
        size = max(1, ENTRIES // head.vocabulary)
        for start in range(0, max(1, len(hidden)), size):  # one empty tile if no token has a label
            tokens = slice(start, start + size)
            pieces = zip((hidden[tokens], *weights), wanted, strict=True)
            inputs = [one.detach().requires_grad_(needed) for one, needed in pieces]
            with torch.enable_grad():
                loss, found = compare(head.logits(*inputs), tokens)
            losses.append(loss.detach())
            numbers.append(found.detach())
            if any(wanted):
                totals = [gradients[0] if gradients[0] is None else gradients[0][tokens], *gradients[1:]]
                added = torch.autograd.grad(loss, [one for one in inputs if one.requires_grad])
                for total, gradient in zip((one for one in totals if one is not None), added, strict=True):
                    total.add_(gradient)
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [one.dtype for one in (hidden, *weights)]
        logged = torch.cat(numbers, dim=-1)
        ctx.mark_non_differentiable(logged)
        return torch.stack(losses).sum(), logged

    @staticmethod
    def backward(ctx: FunctionCtx, loss: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scaled = [
            None if one is None else (one * loss).to(dtype)
            for one, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return scaled[0], None, None, *scaled[1:]
