"""The head of a reward model: one number per sequence, in the place of the logits."""

import zlib

import torch
from deepspeed.runtime.zero import GatheredParameters
from transformers import PreTrainedModel

NAMES = ("score", "classifier")
"""What transformers' sequence-classification models call it; PEFT knows the same names."""


def missing(names: set[str]) -> tuple[set[str], set[str]]:
    """Return which of the weights that a model's files lack are those of its head, and the others."""
    head = {name for name in names if name.partition(".")[0] in NAMES}
    return head, names - head


def start(model: PreTrainedModel, seed: int) -> None:
    """Initialise the head with random values that depend only on its name and the seed; a collective under ZeRO-3.

    transformers would draw them from the process's random state, which differs between ranks and after a resume.
    """
    width = getattr(model.config.get_text_config(), "initializer_range", None) or 0.02
    for name, parameter in model.named_parameters():
        if name.partition(".")[0] not in NAMES:
            continue
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        with torch.no_grad(), GatheredParameters([parameter] if hasattr(parameter, "ds_id") else [], modifier_rank=0):
            if parameter.numel():  # under ZeRO-3 the other ranks only take part
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * width)
