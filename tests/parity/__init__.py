"""Every technique trains the same model as plain PyTorch."""

from deepspeed_recipes.prove import plain

__all__ = ["plain"]
