"""Fused and compiled layers, where a recipe asks for them."""

import importlib.util
from pathlib import Path

from transformers import PreTrainedModel
from transformers.integrations.liger import apply_liger_kernel

from recipes.spec.errors import UserError
from recipes.spec.recipe import Recipe
from recipes.spec.run_folder import read_json


def fuse(model: PreTrainedModel) -> None:
    """Replace norms, rotary embeddings and gated feed-forward layers by Liger's kernels; the loss stays as it is.

    Raises:
        UserError: it is not installed, or nothing here runs its kernels.
    """
    if importlib.util.find_spec("liger_kernel") is None:
        raise UserError("liger_kernel=true: it is not installed; pip install liger-kernel, or leave it out.")
    # The loss is `tiled_loss`, which honours every family's scales and soft caps, and ZeRO-3.
    apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})


def compile_layers(model: PreTrainedModel, recipe: Recipe) -> None:
    """Compile each repeated layer of `model`, in place; compiling begins with the first step.

    Raises:
        UserError: ZeRO-3 would break every layer's graph at every weight.
    """
    stage = read_json(Path(recipe.deepspeed)).get("zero_optimization", {}).get("stage", 0)
    if stage == 3:
        raise UserError(
            f"compile=regional: {Path(recipe.deepspeed).name} is ZeRO-3, which fetches weights in between; "
            "take zero2.json, or leave it out."
        )
    for module in model.modules():
        if type(module).__name__ in (model._no_split_modules or ()):
            module.compile()
