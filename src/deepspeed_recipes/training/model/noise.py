"""Noise on the embeddings of training examples (NEFTune, Jain et al. 2023, arXiv:2310.05914).

transformers' own NEFTune divides by the length of the padded or packed sequence, where the paper divides by the length
of each document, and draws the same numbers on every rank.
"""

import torch
from peft import PeftModel
from transformers import PreTrainedModel

SPREAD = 0x9E3779B97F4A7C15
"""Odd, so that multiples of it modulo 2**64 are all different (Knuth's multiplicative hash)."""


class Noise:
    """Adds noise to the embedding's output in training; the same in every run with the same numbers."""

    def __init__(self, model: PreTrainedModel, alpha: float, seed: int, rank: int) -> None:
        """Args: the model; NEFTune's alpha; the recipe's seed; the number of the data-parallel rank."""
        self.alpha, self.seed, self.rank = alpha, seed, rank
        self.step, self.pass_ = -1, 0
        self.lengths = torch.empty(0)
        inner = model.get_base_model() if isinstance(model, PeftModel) else model
        self.handle = inner.get_input_embeddings().register_forward_hook(self._add)

    def begin(self, step: int, lengths: torch.Tensor) -> None:
        """Set the next forward pass, from the length of each token's document, [sequences, length]; 0 for padding."""
        self.pass_ = self.pass_ + 1 if step == self.step else 0
        self.step = step
        self.lengths = lengths

    def _add(self, module: torch.nn.Module, _: object, embedded: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return embedded
        seed = pass_seed(self.seed, self.step, self.pass_, self.rank)
        generator = torch.Generator(embedded.device).manual_seed(seed)
        drawn = torch.rand(embedded.shape, generator=generator, device=embedded.device) * 2 - 1
        scale = self.alpha / (self.lengths.clamp(min=1) * embedded.shape[-1]).sqrt() * (self.lengths > 0)
        return embedded + (drawn * scale[..., None]).to(embedded.dtype)


def pass_seed(*numbers: int) -> int:
    """Return a seed for a forward pass, of the run's seed, step, pass and rank."""
    mixed = 0
    for number in numbers:
        mixed = ((mixed ^ number) + 1) * SPREAD % 2**64
    return mixed >> 1
