"""A technique with a mistake in it: a right loss, and gradients twice as large; executed on every rank."""

from deepspeed.runtime.engine import DeepSpeedEngine

from deepspeed_recipes.training import run


def main(folder: str) -> None:
    """Train with it."""
    backward = DeepSpeedEngine.backward
    DeepSpeedEngine.backward = lambda self, loss, **options: backward(self, 2 * loss, **options)
    run.main(folder)


def fail(folder: str) -> None:
    """Do not train."""
    raise ValueError(f"no training in {folder[-3:]}")
