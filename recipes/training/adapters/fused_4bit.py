"""Fused LoRA on 4-bit weights. It imports bitsandbytes, which runs without such weights do not."""

from peft.tuners.lora import Linear4bit

from .fused import Fused


class FusedLinear4bit(Fused, Linear4bit):
    """PEFT's layer on bitsandbytes' `Linear4bit`, whose output PEFT copies before it adds to it."""
