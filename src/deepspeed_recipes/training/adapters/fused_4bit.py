"""Fused LoRA on 4-bit weights. It imports bitsandbytes, which runs without such weights do not need."""

from bitsandbytes.nn import Linear4bit
from peft.tuners import lora
from torch import nn

from . import fused


class FusedLinear4bit(fused.Fused, lora.Linear4bit):
    """PEFT's layer on bitsandbytes' `Linear4bit`, whose output PEFT copies before it adds to it."""


LAYERS: dict[type[nn.Module], type[nn.Module]] = {Linear4bit: FusedLinear4bit, **fused.LAYERS}
"""`fused.LAYERS` for a model with 4-bit weights, whose layers are linear layers too."""
