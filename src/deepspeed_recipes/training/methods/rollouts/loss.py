"""The losses on scored answers, as TRL computes them but without reading from the device at every pass.

Shapes: [answers, longest] for values per token, with a mask of the tokens that count; [answers] for advantages.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Clip:
    """Limits of the ratio of a likelihood to its rollout's: between 1 - low and 1 + high."""

    low: float
    high: float

    def surrogate(self, ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        """Return the clipped objective, to be minimised (the paper's equation 3; PPO's, arXiv:1707.06347)."""
        return -torch.min(ratio * advantages, ratio.clamp(1 - self.low, 1 + self.high) * advantages)

    def shares(self, ratio: torch.Tensor, advantages: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the clipped ratios, as booleans for the log."""
        low = (ratio < 1 - self.low) & (advantages < 0)
        high = (ratio > 1 + self.high) & (advantages > 0)
        return {"clip_ratio/low": low, "clip_ratio/high": high, "clip_ratio/both": low | high}


def divergence(log_probs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the estimate of the KL divergence from the reference model at each token, never below 0 (equation 4)."""
    difference = reference - log_probs
    return difference.exp() - difference - 1


def per_answer(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean over answers of the mean over an answer's tokens (equation 3)."""
    return ((losses * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
