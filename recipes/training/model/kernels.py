"""Fused and compiled layers, where a recipe asks for them."""

import importlib.util
from typing import Any

from transformers import PreTrainedModel
from transformers.integrations.liger import apply_liger_kernel

from ...spec.deepspeed_file import DeepSpeedFile
from ...spec.errors import UserError
from ...spec.recipe import Recipe


def fuse(model: PreTrainedModel) -> None:
    """Replace norms, rotary embeddings and gated feed-forward layers with Liger's kernels; the loss stays as it is.

    Raises:
        UserError: Liger is not installed.
    """
    if importlib.util.find_spec("liger_kernel") is None:
        raise UserError("liger_kernel=true: it is not installed; pip install liger-kernel, or leave it out.")
    # The loss is `tiled_loss`, which honours every family's scales and soft caps, and ZeRO-3.
    apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})


def check(recipe: Recipe, file: DeepSpeedFile, on_gpu: bool) -> None:
    """Refuse compiled layers under ZeRO-3, which would break every layer's graph at every weight, and what needs CUDA.

    Raises:
        UserError: names the file and the fix.
    """
    if file.deepcompile and not on_gpu:
        raise UserError(
            f"deepspeed={file.name}: DeepCompile's kernels are CUDA's, and these ranks are on CPUs; use "
            f"zero{file.stage}.json."
        )
    split = sorted({"autosp", "autotp"} & set(file.compiled_passes))
    if split:
        key = {"autosp": "sequence", "autotp": "tensor"}[split[0]]
        raise UserError(
            f"deepspeed={file.name}: compile.passes has {split[0]}, for which a program has to mark its inputs; in a "
            f"recipe write layout.{key}=2, and remove the pass."
        )
    if recipe.compile == "regional" and file.stage == 3:
        raise UserError(
            f"compile=regional: {file.name} is ZeRO-3, which fetches weights between kernels; use zero2.json, or leave "
            "compile out."
        )


def check_active(engine: Any, file: DeepSpeedFile) -> None:
    """Refuse an engine that the file asks to compile and that would train without: as plain ZeRO, and silently.

    Raises:
        UserError: DeepSpeed has left DeepCompile out, for a reason that it only logs.
    """
    if file.deepcompile and not engine.is_deepcompile_active():
        raise UserError(
            f"deepspeed={file.name}: DeepSpeed has not activated DeepCompile, and would train as plain "
            f"ZeRO-{file.stage}; its log says why. Use zero{file.stage}.json, or correct the compile block."
        )


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each repeated layer of `model`, in place; compiling begins with the first step."""
    for module in model.modules():
        if type(module).__name__ in (model._no_split_modules or ()):
            module.compile()
