"""Every technique trains the same model as plain PyTorch."""

from recipes.proof import plain

__all__ = ["plain"]
