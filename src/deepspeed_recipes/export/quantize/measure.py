"""Measures a smaller model's loss: its score on the held-out examples, and how often it writes something else."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from datasets import Dataset

from ...recipe.errors import UserError
from ...recipe.files import Json
from ...recipe.methods import method
from ...training import export
from ...training.data import load, tokenize
from ...training.model import generate
from ...training.parallel import scores
from ..evaluate import score
from ..evaluate.held_out import HeldOut

CALIBRATED_ON = 256
"""Sequences of training data for calibration; more make no measurable difference (arXiv:2210.17323 uses 128)."""
AGREE_ON = 50
"""Held-out sequences on which tokens are compared."""


@dataclass(frozen=True)
class Comparison:
    """A smaller model compared with its original."""

    metric: str
    examples: int
    before: float
    after: float
    same: float
    """Share of the held-out positions at which both prefer the same token, or of the examples answered alike."""
    unit: Literal["token", "answer"]
    """Unit of `same`."""

    def recorded(self) -> Json:
        """Return the comparison for `training/results.json`."""
        found = {"metric": self.metric, "examples": self.examples, "before": self.before, "after": self.after}
        return found | {f"same_{self.unit}": self.same}

    def lines(self) -> list[str]:
        """Return the comparison as lines to print."""
        before, after = (method.shown(self.metric, value) for value in (self.before, self.after))
        where = "at {:.1%} of the positions" if self.unit == "token" else "to {:.1%} of them"
        return [
            f"{method.title(self.metric)} on {self.examples} held-out examples: {before} -> {after}",
            f"the same {self.unit} {where.format(self.same)}",
        ]


def lost(found: Comparison, allowed: float) -> str | None:
    """Return why a smaller model has lost too much, or None if it has not.

    `allowed` is in percentage points of the metric, or in percent if the metric is the loss.
    """
    if found.metric == "loss":
        percent = 100 * (found.after / found.before - 1)
        return f"the loss rises by {percent:.1f} % ({allowed:g} % allowed)." if percent > allowed else None
    if 100 * (found.before - found.after) <= allowed:
        return None
    return (
        f"{method.title(found.metric)} falls from {found.before:.1%} to {found.after:.1%} on {found.examples} "
        f"held-out examples ({allowed:g} points allowed)."
    )


def tokens(whole: Path, quantised: Path, held_out: HeldOut | None, say: Callable[[str], None]) -> Comparison | None:
    """Measure both models and return the comparison, or None without held-out examples."""
    if held_out is None:
        return None
    say(f"measuring both on {len(held_out.examples)} held-out examples")
    sequences = _sequences(held_out.examples.select(range(min(AGREE_ON, len(held_out.examples)))), held_out, whole)
    before, after = (score.of(folder, held_out).value for folder in (whole, quantised))
    same = (_preferred(whole, sequences) == _preferred(quantised, sequences)).double().mean().item()
    return Comparison(held_out.metric, len(held_out.examples), before, after, same, "token")


def calibration(held_out: HeldOut | None, whole: Path) -> list[list[int]]:
    """Return the tokens of some sequences of the training data."""
    if held_out is None:
        raise UserError(
            f"{whole}: its training data is unknown, and this kind is calibrated on examples; add --data FILE."
        )
    examples = load.read_examples(held_out.recipe)[0]
    return _sequences(examples.select(range(min(CALIBRATED_ON, len(examples)))), held_out, whole)


def _sequences(examples: Dataset, held_out: HeldOut, whole: Path) -> list[list[int]]:
    found, _ = tokenize.tokenized(examples, tokenize.alone(held_out.recipe), export.load_tokenizer(whole))
    return [list(sequence) for sequence in found["input_ids"]]


@torch.no_grad()
def _preferred(folder: Path, sequences: list[list[int]]) -> torch.Tensor:
    """Return the token that the model in `folder` would write after each token of the sequences."""
    model = export.load(folder, placed=True)
    found = [
        model(input_ids=torch.tensor([sequence], device=model.device)).logits[0].argmax(-1) for sequence in sequences
    ]
    return torch.cat(found).cpu()


def losses(
    whole: Path, held_out: HeldOut, say: Callable[[str], None], scored: Callable[[list[Json]], list[Json]]
) -> Comparison:
    """Compare a model's loss with that of its GGUF file, whose log-probabilities of sequences `scored` returns."""
    say(f"measuring both on {len(held_out.examples)} held-out examples")
    found, _ = tokenize.tokenized(held_out.examples, tokenize.alone(held_out.recipe), export.load_tokenizer(whole))
    sequences = [list(one) for one in found["input_ids"]]
    theirs = scored([{"tokens": one, "start": 1} for one in sequences])
    learned = [np.array(labels[1:]) != -100 for labels in found["labels"]]
    chosen = [np.array(one["logprobs"])[here] for one, here in zip(theirs, learned, strict=True)]
    after = -float(np.concatenate(chosen).mean())
    # The last token's successor is in neither.
    preferred = _preferred(whole, [one[:-1] for one in sequences]).numpy()
    same = float((preferred == np.concatenate([one["likeliest"] for one in theirs])).mean())
    return Comparison("loss", len(sequences), score.of(whole, held_out).value, after, same, "token")


def answers(
    whole: Path,
    held_out: HeldOut | None,
    say: Callable[[str], None],
    answered: Callable[[Json], Json],
) -> Comparison | None:
    """Compare a model's answers with those of its GGUF file, or return None without held-out conversations.

    `answered` returns llama.cpp's `prompts` and `answers`, as tokens, to `texts` that end at one of `ends`. Refuses a
    file for which llama.cpp makes other tokens than those on which the model was trained.
    """
    if held_out is None or held_out.metric != "exact_match":
        return None
    say(f"comparing both models' answers to {len(held_out.examples)} held-out questions")
    original, tokenizer = score.of(whole, held_out), export.load_tokenizer(whole)
    questions = score.questions(tokenizer, held_out)
    stop = {*(generate.ends_in(whole) or [tokenizer.eos_token_id]), *scores.closing(questions, tokenizer)}
    found = answered(
        {
            "texts": [tokenizer.decode(one.prompt, clean_up_tokenization_spaces=False) for one in questions],
            "ends": sorted(stop),
            "max_new_tokens": held_out.recipe.data.max_new_tokens,
        }
    )
    if found["prompts"] != [one.prompt for one in questions]:
        raise UserError(f"{whole}: llama.cpp tokenizes differently from the model's tokenizer; serve it with vLLM.")
    theirs = [
        scores.compared(one, answer, stop, tokenizer) for one, answer in zip(questions, found["answers"], strict=True)
    ]
    examples = len(questions)
    right = sum(answer.right for answer in theirs) / examples
    same = sum(answer.text == text for answer, text in zip(theirs, original.answers, strict=True)) / examples
    return Comparison(held_out.metric, examples, original.value, right, same, "answer")
