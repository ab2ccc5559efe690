"""Sampling that depends only on the seed, the step and the answer's place in the batch.

transformers samples from the rank's global random numbers, so that another number of ranks, another order or a resumed
run gives other answers. Here every answer has its own random numbers: `argmax(logits / T - log E)` with E from an
exponential distribution is a sample of `softmax(logits / T)` (the Gumbel-max trick; Maddison et al. 2014,
arXiv:1411.0030, section 2).
"""

import hashlib
from collections.abc import Iterable, Sequence

import torch
from transformers import LogitsProcessor, Trainer
from trl.models.utils import unwrap_model_for_generation

from ...model.generate import continued


class Noise(LogitsProcessor):
    """Adds each answer's own random numbers to its logits, so that the likeliest token is a sample."""

    def __init__(self, seeds: Sequence[int], temperature: float, device: torch.device) -> None:
        """`seeds`: one for each answer of the batch."""
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self.temperature = temperature

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return noisy logits, [answers, vocabulary]."""
        noise = torch.empty_like(scores, dtype=torch.float32)
        for row, generator in zip(noise, self.generators, strict=True):
            row.exponential_(generator=generator)
        tiny = torch.finfo(torch.float32).tiny  # a draw may round to 0
        return scores.float() / self.temperature - noise.clamp_(min=tiny).log()


def seeds(seed: int, step: int, answers: Iterable[int]) -> list[int]:
    """Return a seed for each answer of a step, by its number in the global batch, or its example's in the data."""
    keys = (f"{seed} {step} {answer}".encode() for answer in answers)
    return [int.from_bytes(hashlib.blake2b(one, digest_size=7).digest()) for one in keys]


def written(
    trainer: Trainer, prompts: Sequence[list[int]], noise: Noise, max_new_tokens: int, end: Sequence[int], gather: bool
) -> list[list[int]]:
    """Return the answers of a trainer's current model to prompts, without dropout; a collective under ZeRO-3.

    Args:
        trainer: the run's.
        prompts: tokens.
        noise: for as many answers.
        max_new_tokens: limit per answer.
        end: tokens that end an answer.
        gather: make ZeRO-3's weights whole on every rank meanwhile.
    """
    training = trainer.model.training
    with unwrap_model_for_generation(
        trainer.model_wrapped, trainer.accelerator, gather_deepspeed3_params=gather
    ) as model:
        model.eval()
        # With shards instead of whole weights, all ranks generate until the last has finished.
        synced = trainer.context.file.stage == 3 and not gather
        found = continued(model, trainer.processing_class, prompts, max_new_tokens, synced, end, noise)
        model.train(training)
    return found
