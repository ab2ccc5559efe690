"""Fused and compiled layers and 8-bit products, which a recipe can turn on."""

import importlib.util
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.integrations.liger import apply_liger_kernel

from ...recipe.deepspeed_file import DeepSpeedFile
from ...recipe.errors import UserError
from ...recipe.recipe import Recipe

FP8 = (8, 9)
"""Compute capability (Ada) from which a GPU multiplies in 8-bit floats."""
FP8_STEP = 16
"""The widths of the multiplied matrices must be multiples of this."""


def fuse(model: PreTrainedModel) -> None:
    """Replace norms, rotary embeddings and gated feed-forward layers with Liger's kernels; the loss is unchanged.

    Raises:
        UserError: Liger is not installed.
    """
    if importlib.util.find_spec("liger_kernel") is None:
        raise UserError("liger_kernel=true: liger-kernel is not installed; pip install liger-kernel, or leave it out.")
    # The loss is `tiled_loss`, which supports every family's scales and soft caps, and ZeRO-3.
    apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})


def multiply_in_fp8(model: PreTrainedModel, on_gpu: bool) -> None:
    """Make the decoder's linear layers multiply in 8-bit floats during training, with a scale per tensor.

    Forward products are in e4m3 and gradients in e5m2 (torchao's default recipe, after "FP8 Formats for Deep Learning",
    arXiv:2209.05433). The head and routers keep their precision. In evaluation, layers compute in the precision in
    which the export will be used.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    def fits(module: torch.nn.Linear, name: str) -> bool:
        fitting = module.in_features % FP8_STEP == 0 and module.out_features % FP8_STEP == 0
        return fitting and not name.endswith((".gate", ".router"))

    convert_to_float8_training(model.base_model, config=Float8LinearConfig(emulate=not on_gpu), module_filter_fn=fits)
    for layer in model.modules():
        if isinstance(layer, Float8Linear):
            layer.forward = partial(_exact_in_evaluation, layer, layer.forward)


def _exact_in_evaluation(layer: torch.nn.Linear, train: Any, inputs: torch.Tensor) -> torch.Tensor:
    return train(inputs) if layer.training else linear(inputs, layer.weight, layer.bias)


def _check_fp8(on_gpu: bool) -> None:
    if importlib.util.find_spec("torchao") is None:
        raise UserError("fp8=true: torchao is not installed; pip install torchao, or leave fp8 out.")
    if on_gpu and torch.cuda.get_device_capability() < FP8:
        raise UserError(
            f"fp8=true: {torch.cuda.get_device_name()} does not multiply in 8-bit floats; Ada (RTX 4090, L4), Hopper "
            "and later GPUs do. Leave fp8 out."
        )


def check(recipe: Recipe, file: DeepSpeedFile, on_gpu: bool) -> None:
    """Refuse what needs CUDA on CPUs, and passes of DeepCompile for other programs.

    Raises:
        UserError: the message has the file and the fix.
    """
    if recipe.fp8:
        _check_fp8(on_gpu)
    if file.deepcompile and not on_gpu:
        raise UserError(
            f"deepspeed={file.name}: DeepCompile's kernels are CUDA's, and these ranks are on CPUs; use "
            f"zero{file.stage}.json."
        )
    if file.super_offload and not on_gpu:
        raise UserError(
            f"deepspeed={file.name}: DeepSpeed's SuperOffload is for CUDA, and these ranks are on CPUs; use "
            "zero3_offload.json."
        )
    split = sorted({"autosp", "autotp"} & set(file.compiled_passes))
    if split:
        key = {"autosp": "sequence", "autotp": "tensor"}[split[0]]
        raise UserError(
            f"deepspeed={file.name}: compile.passes has {split[0]}, for which a program has to mark its inputs; in a "
            f"recipe write layout.{key}=2, and remove the pass."
        )


def check_active(engine: Any, file: DeepSpeedFile) -> None:
    """Refuse an engine that should be compiled but would silently train as plain ZeRO.

    Raises:
        UserError: DeepSpeed has skipped DeepCompile, for a reason that it only logs.
    """
    if file.deepcompile and not engine.is_deepcompile_active():
        raise UserError(
            f"deepspeed={file.name}: DeepSpeed has not activated DeepCompile, and would train as plain "
            f"ZeRO-{file.stage}; its log has the reason. Use zero{file.stage}.json, or correct the compile block."
        )


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each repeated layer of `model`, in place; compilation begins with the first step."""
    for module in model.modules():
        if type(module).__name__ in (model._no_split_modules or ()):
            module.compile()
