"""A run whose fused adapters compute something else; executed by every rank."""

import torch

from deepspeed_recipes.training import run
from deepspeed_recipes.training.model import lora


def unscaled_gradients(folder: str) -> None:
    """Train with gradients of the adapters that are not scaled."""
    lora._scaled_product = lambda left, right, scale: left @ right
    run.main(folder)


def unscaled_outputs(folder: str) -> None:
    """Train with outputs that are not scaled."""
    forward = lora.UpProjection.forward

    def unscaled(ctx, output, reduced, up, scaling):
        summed = forward(ctx, output, reduced, up, 1.0)
        ctx.scaling = scaling
        return summed

    lora.UpProjection.forward = staticmethod(unscaled)
    run.main(folder)


def overwritten_gradients(folder: str) -> None:
    """Train with the adapter's share of the input's gradient in the place of the base layer's."""
    backward = lora.DownProjection.backward

    def without_the_base(ctx, of_inputs, of_reduced):
        return backward(ctx, torch.zeros_like(of_inputs), of_reduced)

    lora.DownProjection.backward = staticmethod(without_the_base)
    run.main(folder)
