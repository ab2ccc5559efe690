"""Checkpointing of layers: which of their activations are kept, and which are computed again in the backward pass."""

from functools import cache
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ..spec.recipe import Recipe

KEPT = (
    *("aten::mm", "aten::addmm", "aten::_grouped_mm", "transformers::grouped_mm_fallback", "torch_attn::_varlen_attn"),
    *("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),
    *("aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention"),
    *("aten::_flash_attention_forward", "flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward"),
)
"""What `selective` does not compute again: products with weights, and attention; nearly all of a layer's time."""


def of_layers(recipe: Recipe) -> bool:
    """Return whether whole layers are checkpoints, whatever is kept of them besides their inputs."""
    return recipe.gradient_checkpointing in (True, "selective")


def options(recipe: Recipe) -> dict[str, Any]:
    """Return how transformers is to call `torch.utils.checkpoint`."""
    kept = {"context_fn": keep_products} if recipe.gradient_checkpointing == "selective" else {}
    return {"use_reentrant": False} | kept


def keep_products() -> Any:
    """Return the contexts of a layer's forward pass and of its recomputation: what KEPT computes is computed once.

    The policy is PyTorch's: its dispatch modes see every operator, also of 4-bit layers and of ZeRO-3's.
    """
    return create_selective_checkpoint_contexts(_operators())


@cache  # asked for by each layer in each pass
def _operators() -> list[Any]:
    """Return those of KEPT that this environment has."""
    spaces = (name.split("::") for name in KEPT)
    found = (getattr(getattr(torch.ops, space), short, None) for space, short in spaces)
    return [packet.default for packet in found if packet is not None]
