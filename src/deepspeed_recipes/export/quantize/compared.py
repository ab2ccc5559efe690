"""Measures a quantised model's loss: its score on the held-out examples, and how often its next token differs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from ...recipe.errors import UserError
from ...training import distributed, export
from ...training.data import load, tokenize
from ..evaluate import comparison, score
from ..evaluate.held_out import HeldOut

CALIBRATED_ON = 256
"""Sequences of training data for calibration; more make no measurable difference (arXiv:2210.17323 uses 128)."""
AGREE_ON = 50
"""Held-out sequences on which tokens are compared."""


@dataclass(frozen=True)
class Comparison:
    """A quantised model compared with its original."""

    metric: str
    examples: int
    before: float
    after: float
    agreement: float
    """Share of the held-out examples' positions at which both would write the same token."""
    allowed: float
    """Allowed loss in percentage points, or in percent if the metric is the loss."""

    def recorded(self) -> dict[str, Any]:
        """Return the comparison for `training/results.json`."""
        return {
            "metric": self.metric,
            "examples": self.examples,
            "before": self.before,
            "after": self.after,
            "same_token": self.agreement,
        }

    def lines(self) -> list[str]:
        """Return the comparison as lines to print."""
        before, after = (comparison.shown(self.metric, value) for value in (self.before, self.after))
        name = self.metric.replace("_", " ")
        return [
            f"{name} on {self.examples} held-out examples: {before} -> {after}",
            f"the same token at {self.agreement:.1%} of the positions",
        ]


@dataclass(frozen=True)
class Original:
    """The examples on which models are measured and calibrated."""

    held_out: HeldOut | None
    """The held-out examples and their recipe, or None if they are unknown."""
    allowed: float

    def compared(self, whole: Path, quantised: Path, say: Callable[[str], None]) -> Comparison | None:
        """Measure both models and return the comparison, or None without held-out examples."""
        held_out = self.held_out
        if held_out is None:
            return None
        say(f"measuring both on {len(held_out.examples)} held-out examples")
        sequences = _sequences(held_out.examples.select(range(min(AGREE_ON, len(held_out.examples)))), held_out, whole)
        before, after = (score.of(folder, held_out).value for folder in (whole, quantised))
        same = (_preferred(whole, sequences) == _preferred(quantised, sequences)).double().mean().item()
        return Comparison(held_out.metric, len(held_out.examples), before, after, same, self.allowed)

    def calibration(self, whole: Path) -> list[list[int]]:
        """Return the tokens of some sequences of the training data.

        Raises:
            UserError: the training data is unknown.
        """
        if self.held_out is None:
            raise UserError(
                f"{whole}: its training data is unknown, and this kind is calibrated on examples; add --data FILE."
            )
        examples = load.read_examples(self.held_out.recipe)[0]
        return _sequences(examples.select(range(min(CALIBRATED_ON, len(examples)))), self.held_out, whole)


def lost(found: Comparison) -> str | None:
    """Return why a quantised model has lost too much, or None if it has not."""
    if found.metric == "loss":
        percent = 100 * (found.after / found.before - 1)
        return f"the loss rises by {percent:.1f} % ({found.allowed:g} % allowed)." if percent > found.allowed else None
    points = 100 * (found.before - found.after)
    name = found.metric.replace("_", " ")
    if points <= found.allowed:
        return None
    return (
        f"{name} falls from {found.before:.1%} to {found.after:.1%} on {found.examples} held-out examples "
        f"({found.allowed:g} points allowed)."
    )


def _sequences(examples: Dataset, held_out: HeldOut, whole: Path) -> list[list[int]]:
    recipe = replace(held_out.recipe, packing=False)
    tokens, _ = tokenize.tokenized(examples, recipe, export.load_tokenizer(whole))
    return [list(sequence) for sequence in tokens["input_ids"]]


@torch.no_grad()
def _preferred(folder: Path, sequences: list[list[int]]) -> torch.Tensor:
    """Return the token that the model in `folder` would write after each token of the sequences."""
    model = export.load(folder).to(distributed.device()).eval()
    found = [
        model(input_ids=torch.tensor([sequence], device=model.device)).logits[0].argmax(-1) for sequence in sequences
    ]
    return torch.cat(found).cpu()
