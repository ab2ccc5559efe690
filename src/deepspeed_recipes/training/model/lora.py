"""LoRA, QLoRA and DoRA: freezes or quantises the base model and adds the weights that are trained."""

import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from deepspeed.runtime.zero import GatheredParameters
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import BitsAndBytesConfig, PreTrainedModel

from ...recipe.conversions import lora_options
from ...recipe.errors import UserError
from ...recipe.recipe import Lora, names
from ...recipe.run_folder import read_json, write_json
from .. import upstream
from . import fused_lora
from .vision_tower import NAMES as VISION

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
    rows: dict[str, list[int]] | list[int] | None = None,
) -> PeftModel:
    """Return the model with adapters in the model's dtype; everything else is frozen, except for a head that scores.

    Args:
        model: of the kind that the method trains.
        lora: the adapters.
        seed: for their random values.
        scores: the model scores sequences: a reward model or a classifier.
        embeds: the model has no head.
        excluded: modules without adapters, as a regular expression.
        rows: PEFT's `trainable_token_indices`, or nothing.

    Raises:
        UserError: the targets are not in this model, or cannot be adapted in this way.
    """
    try:
        given = lora_options(lora, scores, embeds, model.config.model_type)
        if saved := names(lora.modules_to_save):
            if absent := [
                name for name in saved if not any(f".{one}".endswith(f".{name}") for one, _ in model.named_modules())
            ]:
                raise UserError(f"lora.modules_to_save={lora.modules_to_save}: the model has no module {absent[0]}.")
            given["ensure_weight_tying"] = bool(model.config.get_text_config().tie_word_embeddings)
        given["trainable_token_indices"] = rows or None
        options = LoraConfig(**given | ({"exclude_modules": excluded} if excluded else {}))
        if lora.fused:
            options._register_custom_module(fused_lora.layers(getattr(model, "is_loaded_in_4bit", False)))
        with _drawing(seed), upstream.reading_rows(model):
            adapted = get_peft_model(model, options, autocast_adapter_dtype=False)
    except ValueError as error:
        targets = f"lora.target_modules={lora.target_modules}"
        if lora.target_parameters:
            targets += f" lora.target_parameters={lora.target_parameters}"
        raise UserError(f"{targets}: {str(error).partition('. ')[0]}.") from error
    upstream.replace_rows_in_outputs(adapted)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(model.dtype)
    if lora.init == "pissa":
        _remember_start(adapted)
    else:
        _start_by_name(adapted, seed)
    return adapted


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


SIDES = {"lora_A": 0, "lora_B": 1}
"""The parts of an adapter, and the dimension of each that is its rank."""


@contextmanager
def _drawing(seed: int) -> Iterator[None]:
    """Make PEFT's fast decomposition draw the same numbers on every rank, and again when a run is resumed."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def _remember_start(model: PeftModel) -> None:
    """Store the adapters' current values next to them, in buffers that no checkpoint contains."""
    for layer in _lora_layers(model).values():
        for side in SIDES:
            weight = getattr(layer, side)[model.active_adapter].weight
            layer.register_buffer(f"start_{side}", weight.detach().clone(), persistent=False)


def export_pissa(model: PeftModel, folder: Path) -> None:
    """Convert the adapter in `folder` into an adapter of twice the rank on the unchanged base model.

    PiSSA (Meng et al. 2024, arXiv:2404.02948) starts adapters as a weight's largest singular values, and subtracts them
    from the weights, so the frozen model differs from the model in the files. The export is therefore the trained
    adapter minus the initial one.

    W + s (B A - B0 A0) = W + s [B, -B0] [A; A0], and the scale s, alpha / rank or alpha / sqrt(rank), stays the same.
    """
    file = folder / "adapter_model.safetensors"
    weights = load_file(file)
    for name, layer in _lora_layers(model).items():
        for side, dimension in SIDES.items():
            start = getattr(layer, f"start_{side}").to("cpu", weights[f"{name}.{side}.weight"].dtype)
            sign = -1 if side == "lora_B" else 1
            joined = torch.cat([weights[f"{name}.{side}.weight"], sign * start], dim=dimension)
            weights[f"{name}.{side}.weight"] = joined.contiguous()
    save_file(weights, file, metadata={"format": "pt"})
    config = read_json(folder / "adapter_config.json")
    factor = math.sqrt(2) if config["use_rslora"] else 2
    doubled = {"r": 2 * config["r"], "lora_alpha": factor * config["lora_alpha"], "init_lora_weights": True}
    write_json(folder / "adapter_config.json", config | doubled)


def _lora_layers(model: PeftModel) -> dict[str, LoraLayer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
