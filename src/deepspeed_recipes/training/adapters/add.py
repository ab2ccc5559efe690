"""LoRA, QLoRA and DoRA: freezes or quantises the base model and adds the weights that are trained."""

import math
import zlib
from collections.abc import Sequence

import torch
from deepspeed.runtime.zero import GatheredParameters
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import BitsAndBytesConfig, PreTrainedModel

from ...recipe.conversions import lora_options
from ...recipe.errors import UserError
from ...recipe.recipe import Lora
from ..vision.tower import NAMES as VISION
from . import fused, pissa

HEAD_AND_TOWER = ("lm_head", *(rf"(.*\.)?{name}" for name in VISION))
"""Modules of a vision-language model that keep the training dtype; transformers matches the whole name."""


def nf4(dtype: torch.dtype, kept: Sequence[str] | None = None) -> BitsAndBytesConfig:
    """Return QLoRA's 4-bit quantisation (arXiv:2305.14314): NF4 with double quantisation.

    `kept` names the modules that are not quantised; None keeps only the head.

    The packed bytes are stored as the training dtype: DeepSpeed casts every floating-point parameter to that dtype, and
    would convert bytes of another dtype as if they were numbers.
    """
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
        llm_int8_skip_modules=list(kept) if kept else None,
    )


def add(
    model: PreTrainedModel,
    lora: Lora,
    seed: int = 0,
    scores: bool = False,
    embeds: bool = False,
    excluded: str | None = None,
) -> PeftModel:
    """Return the model with adapters in the model's dtype; everything else is frozen, except for a head that scores.

    Args:
        model: of the kind that the method trains.
        lora: the adapters.
        seed: for their random values.
        scores: the model scores sequences: a reward model or a classifier.
        embeds: the model has no head.
        excluded: modules without adapters, as a regular expression.

    Raises:
        UserError: the targets are not in this model, or cannot be adapted in this way.
    """
    try:
        given = lora_options(lora, scores, embeds, model.config.model_type)
        options = LoraConfig(**given | ({"exclude_modules": excluded} if excluded else {}))
        if lora.fused:
            options._register_custom_module(_fused_layers(model))
        with pissa.drawing(seed):
            adapted = get_peft_model(model, options, autocast_adapter_dtype=False)
    except ValueError as error:
        targets = f"lora.target_modules={lora.target_modules}"
        if lora.target_parameters:
            targets += f" lora.target_parameters={lora.target_parameters}"
        raise UserError(f"{targets}: {str(error).partition('. ')[0]}.") from error
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(model.dtype)
    if lora.init == "pissa":
        pissa.remember(adapted)
    else:
        _start_by_name(adapted, seed)
    return adapted


def _fused_layers(model: PreTrainedModel) -> dict[type[torch.nn.Module], type[torch.nn.Module]]:
    if not getattr(model, "is_loaded_in_4bit", False):
        return fused.LAYERS
    from . import fused_4bit  # which imports bitsandbytes

    return fused_4bit.LAYERS


def _start_by_name(adapted: PeftModel, seed: int) -> None:
    """Initialise each adapter with random values that depend only on its name and the seed.

    PEFT draws them in sequence, so a stage of a pipeline, which has other layers, would get different values.
    """
    for name, parameter in adapted.named_parameters():
        if "lora_A" in name and not parameter.is_meta:
            generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
            with GatheredParameters([parameter] if hasattr(parameter, "ds_id") else [], modifier_rank=0):
                drawn = torch.empty(parameter.shape)
                if drawn.numel():  # under ZeRO-3 the other ranks only take part
                    torch.nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)  # as PEFT does
                parameter.data.copy_(drawn)
