"""Refuses layouts and DeepSpeed files that a recipe's optimizer, adapters or noise cannot be combined with."""

from collections.abc import Iterator

from ..deepspeed_file import DeepSpeedFile
from ..errors import UserError
from ..recipe import Recipe

EXCLUDES = {
    "muon": {
        "tensor": "Muon orthogonalises whole matrices, and a tensor-parallel rank has parts of them",
        "pipeline": "DeepSpeed's Muon is tested with data parallelism, and not with its pipeline",
        "expert": "AdamW would train the experts, which are stacks of matrices and hold most of the weights",
    },
    "adamw_8bit": dict.fromkeys(
        ("tensor", "pipeline", "expert"), "bitsandbytes' optimizer is tested with data and sequence parallelism only"
    ),
    "layer_decay": {
        "pipeline": "a pipeline's layers have other names, from which layer_decay cannot read their depth",
        "expert": "DeepSpeed's AutoEP puts all experts into one parameter group, which has one learning rate",
    },
    "lora.plus_ratio": {"pipeline": "LoRA+ is tested with whole models, and not with a pipeline's stages"},
    "lora.init": dict.fromkeys(
        ("tensor", "pipeline"), "PiSSA decomposes whole matrices of the whole model, and each rank has a part of it"
    ),
    "lora.fused": {"tensor": "a rank has a part of each adapter, whose products are summed over ranks one by one"},
    "neftune_alpha": {
        "sequence": "NEFTune's noise depends on the length of a document, and each rank has only a part of it",
        "pipeline": "NEFTune is tested with whole models, and not with a pipeline's stages",
    },
}
"""Why a setting does not train with a kind of parallelism, by the setting and the layout's field."""


def used(recipe: Recipe) -> Iterator[str]:
    """Yield the keys of `EXCLUDES` that a recipe uses."""
    lora = recipe.lora
    yield recipe.optimizer
    if recipe.layer_decay < 1:
        yield "layer_decay"
    if lora is not None and lora.plus_ratio != 1:
        yield "lora.plus_ratio"
    if lora is not None and lora.init == "pissa":
        yield "lora.init"
    if lora is not None and lora.fused:
        yield "lora.fused"
    if recipe.neftune_alpha:
        yield "neftune_alpha"


def excluded(recipe: Recipe, technique: str) -> Iterator[str]:
    """Yield the reasons why a recipe's settings do not train with a kind of parallelism."""
    for key in used(recipe):
        if why := EXCLUDES.get(key, {}).get(technique):
            yield why


def check(recipe: Recipe, file: DeepSpeedFile) -> None:
    """Refuse a DeepSpeed file that does not train with the recipe's optimizer.

    Raises:
        UserError: names the optimizer, the file's key, and the fix.
    """
    own = {recipe.optimizer, "layer_decay", "lora.plus_ratio"} - {"adamw"}
    if file.optimizer and recipe.layout.expert == 1 and own & set(used(recipe)):
        raise UserError(
            f"deepspeed={file.name}: its optimizer block would replace the recipe's optimizer and its learning rates; "
            "remove the block, or use another file."
        )
    if file.deepcompile and recipe.lora is not None and recipe.lora.fused:
        raise UserError(
            f"lora.fused=true with deepspeed={file.name}: DeepCompile fuses scaling and addition itself; use "
            "lora.fused=false."
        )
    if found := next(refused(recipe, file), None):
        why, use = found
        raise UserError(f"optimizer={recipe.optimizer} with deepspeed={file.name}: {why}; use {use}.")


def refused(recipe: Recipe, file: DeepSpeedFile) -> Iterator[tuple[str, str]]:
    """Yield why a file does not train with an optimizer other than AdamW, and what to use instead."""
    if recipe.optimizer == "adamw":
        return
    bf16, zero = file.content.get("bf16", {}), file.zero
    if file.offload_optimizer != "none":
        yield (
            "DeepSpeed updates offloaded states with its own AdamW",
            f"optimizer=adamw, or deepspeed=zero{file.stage}.json",
        )
    if bf16.get("bf16_optimizer_states"):
        yield "bf16_optimizer_states is for Adam", f"optimizer=adamw, or deepspeed=zero{file.stage}.json"
    if recipe.optimizer != "muon":
        return
    if file.stage == 0 and recipe.precision != "fp32":
        yield "without ZeRO DeepSpeed's Muon trains in fp32 only", "deepspeed=zero1.json"
    if recipe.precision == "fp16":
        yield "Muon is tested in bf16 and fp32", "precision=bf16"
    if file.partition_size > 1 or zero.get("zero_quantized_gradients"):
        yield "Muon needs whole gradients, so neither hpZ nor quantised gradients", "deepspeed=zero3.json"
    if file.stage == 3 and zero.get("reduce_scatter") is True:
        yield "Muon needs whole gradients, so not reduce_scatter: true", "the file without that key"
    if file.deepcompile:
        yield "DeepCompile is tested with AdamW only", f"deepspeed=zero{file.stage}.json"
