"""Activation checkpointing: which activations of a layer are kept and where, and which are computed again."""

from functools import cache
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from ..recipe.files import Json
from ..recipe.recipe import Recipe

KEPT = (
    *("aten::mm", "aten::addmm", "aten::_grouped_mm", "transformers::grouped_mm_fallback", "torch_attn::_varlen_attn"),
    *("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),
    *("aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention"),
    *("aten::_flash_attention_forward", "flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward"),
)
"""Operators whose results `selective` keeps: products with weights, and attention; nearly all of a layer's time."""


def of_layers(recipe: Recipe) -> bool:
    """Return whether each layer is a checkpoint of its own, however much is kept in addition to its inputs."""
    return recipe.gradient_checkpointing in (True, "selective")


def options(recipe: Recipe) -> Json:
    """Return the arguments with which transformers calls `torch.utils.checkpoint`."""
    kept = {"context_fn": keep_products} if recipe.gradient_checkpointing == "selective" else {}
    return {"use_reentrant": False} | kept


def keep_products() -> Any:
    """Return the contexts of a layer's forward pass and its recomputation, in which operators in KEPT run only once.

    The policy is PyTorch's: its dispatch modes receive every operator, including those of 4-bit layers and of ZeRO-3.
    """
    return create_selective_checkpoint_contexts(_operators())


@cache  # called by each layer in each pass
def _operators() -> list[torch._ops.OpOverload]:
    spaces = (name.split("::") for name in KEPT)
    found = (getattr(getattr(torch.ops, space), short, None) for space, short in spaces)
    return [packet.default for packet in found if packet is not None]


def offload_inputs(model: PreTrainedModel, on_gpu: bool) -> "LayerInputs":
    """Make checkpointed layers of `model` keep their inputs in host memory between its passes.

    On GPUs TRL copies them in both directions on its own stream; on CPU ranks torch copies them, which saves nothing
    there and computes the same. Only the layers are hooked: torch no longer marks tensors saved through hooks as
    parameters, and under ZeRO-3 TRL's tiled loss needs that mark of the head. Adapters may be added later.
    """
    mover: saved_tensors_hooks = save_on_cpu()
    if on_gpu:
        from trl.models.activation_offloading import OffloadActivations  # imported only where it is needed

        mover = OffloadActivations()
    inputs = LayerInputs(mover, model.config.get_text_config().hidden_size)
    layers = model.base_model
    layers.register_forward_pre_hook(lambda *_: inputs.__enter__())
    layers.register_forward_hook(lambda *_: inputs.__exit__(), always_call=True)
    return inputs


class LayerInputs(saved_tensors_hooks):
    """Gives tensors of the layers' width to another context's hooks, and keeps all others where they are."""

    def __init__(self, mover: saved_tensors_hooks, hidden: int) -> None:
        self.mover, self.hidden = mover, hidden
        self.bytes = 0
        """Size of the tensors that the mover holds."""
        super().__init__(self._keep, self._give_back)

    def __enter__(self) -> None:
        self.mover.__enter__()
        super().__enter__()

    def __exit__(self, *failure: object) -> None:
        super().__exit__(*failure)
        self.mover.__exit__(*failure)

    def _keep(self, tensor: torch.Tensor) -> Any:
        if tensor.dim() != 3 or tensor.shape[-1] != self.hidden or not tensor.is_floating_point():
            return tensor
        self.bytes += tensor.nbytes
        return tensor.nbytes, self.mover.pack_hook(tensor)

    def _give_back(self, kept: Any) -> torch.Tensor:
        if torch.is_tensor(kept):
            return kept
        size, moved = kept
        self.bytes -= size
        return self.mover.unpack_hook(moved)
