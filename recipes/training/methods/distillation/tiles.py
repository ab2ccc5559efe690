"""The loss of distillation in tiles of tokens, so that no model's whole logits ever exist.

A tile's logits, its loss and its gradients with respect to the hidden states and the head's weights are computed at
once, in the forward pass, and the logits forgotten: the head is multiplied once per model and pass, and the backward
pass only scales what is there. TRL's `ChunkedDivergenceFunction` goes over both heads three times, for a GPU's kernels,
knows neither the cross-entropy nor a cache of the likeliest tokens, and would need a second pass for either.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel

ENTRIES = 2**25
"""Logits in a tile: 128 MiB in fp32, which the loss holds about eight times; 262 tokens of a vocabulary of 128,000."""

Compare = Callable[[torch.Tensor, slice], tuple[torch.Tensor, torch.Tensor]]
"""Of the logits of some tokens, and which these are: their loss, summed, and numbers to be logged, [kinds, tokens]."""


@dataclass(frozen=True)
class Head:
    """A model's output head: what turns its last hidden states into logits."""

    module: torch.nn.Module
    scale: float
    softcap: float | None
    vocabulary: int
    """How many entries count; models of one tokenizer have heads of several sizes, padded for speed."""

    @property
    def weights(self) -> list[torch.Tensor]:
        """The head's weight, [vocabulary, hidden], and its bias where it has one."""
        return [one for one in (self.module.weight, self.module.bias) if one is not None]

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits of hidden states, [tokens, vocabulary], in fp32.

        Args:
            hidden: [tokens, hidden].
            weight: as in `weights`; ZeRO-3 has to have gathered it.
            bias: as in `weights`.
        """
        kept = None if bias is None else bias[: self.vocabulary]
        logits = linear(hidden, weight[: self.vocabulary], kept).float() * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def head_of(model: PreTrainedModel, vocabulary: int) -> Head:
    """Return a model's head, with the factor and the soft cap that architectures apply to its logits."""
    config = model.config.get_text_config()
    scale = next((found for name in SCALES if (found := getattr(config, name, None)) is not None), 1.0)
    if (divisor := getattr(config, "logits_scaling", None)) is not None:  # Granite's and MiniCPM's
        scale = 1 / divisor
    return Head(model.get_output_embeddings(), scale, getattr(config, "final_logit_softcapping", None), vocabulary)


SCALES = ("logit_scale", "output_multiplier", "lm_head_multiplier")
"""What configurations call the factor of their logits: Cohere, Muse, Falcon-H1."""


def summed(hidden: torch.Tensor, head: Head, compare: Compare) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of `compare`, summed over all tokens, and its numbers, which have no gradients.

    Args:
        hidden: of the tokens, [tokens, hidden].
        head: its weights have to be gathered.
        compare: what to compute of a tile.
    """
    return _Tiles.apply(hidden, head, compare, *head.weights)


class _Tiles(torch.autograd.Function):
    """Computes loss and gradients tile by tile."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: Head, compare: Compare, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wanted = [ctx.needs_input_grad[0], *ctx.needs_input_grad[3:]]
        # In fp32: in bf16 a sum over many tiles would lose the small ones.
        gradients = [
            torch.zeros_like(one, dtype=torch.float32) if needed else None
            for one, needed in zip((hidden, *weights), wanted, strict=True)
        ]
        losses, numbers = [], []
        size = max(1, ENTRIES // head.vocabulary)
        for start in range(0, max(1, len(hidden)), size):  # one empty tile where no token has a label
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
