"""The loss of distillation in tiles of tokens, so that no model's whole logits ever exist.

A tile's logits, its loss and its gradients with respect to the hidden states and the head's weights are computed
together, in the forward pass, and the logits discarded: the head is multiplied once per model and pass, and the
backward pass only scales these gradients. TRL's `ChunkedDivergenceFunction` computes both heads three times, for a
GPU's kernels; it supports neither the cross-entropy nor a cache of the likeliest tokens, and would need a second pass
for either.
"""

from collections.abc import Callable
from typing import Any

import torch

from ...model.output_head import Head

ENTRIES = 2**25
"""Logits in a tile: 128 MiB in fp32, which the loss holds about eight times; 262 tokens of a vocabulary of 128,000."""

Compare = Callable[[torch.Tensor, slice], tuple[torch.Tensor, torch.Tensor]]
"""Maps the logits of some tokens, and their slice, to their summed loss and numbers to log, [kinds, tokens]."""


def summed(hidden: torch.Tensor, head: Head, compare: Compare) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of `compare`, summed over all tokens, and its numbers, which have no gradients.

    Args:
        hidden: hidden states, [tokens, hidden].
        head: its weights must be gathered.
        compare: computes the loss of a tile.
    """
    return _Tiles.apply(hidden, head, compare, *head.weights)


class _Tiles(torch.autograd.Function):
    """Computes loss and gradients tile by tile."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: Head, compare: Compare, *weights: torch.Tensor
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
                _add(totals, torch.autograd.grad(loss, [one for one in inputs if one.requires_grad]))
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [one.dtype for one in (hidden, *weights)]
        logged = torch.cat(numbers, dim=-1)
        ctx.mark_non_differentiable(logged)
        return torch.stack(losses).sum(), logged

    @staticmethod
    def backward(ctx: Any, loss: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
        scaled = [
            None if one is None else (one * loss).to(dtype)
            for one, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return scaled[0], None, None, *scaled[1:]


def _add(totals: list[torch.Tensor | None], gradients: tuple[torch.Tensor, ...]) -> None:
    """Add gradients to the totals of those inputs that have one."""
    for total, gradient in zip((one for one in totals if one is not None), gradients, strict=True):
        total.add_(gradient)
