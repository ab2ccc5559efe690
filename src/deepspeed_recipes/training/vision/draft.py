"""A draft of a vision-language model: its tower and processor are shrunken together with its language part."""

import math
from collections.abc import Callable
from typing import Any

from transformers import (
    AutoTokenizer,
    Gemma3Processor,
    Idefics3Processor,
    LlavaProcessor,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Qwen2_5_VLProcessor,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from ...recipe.errors import UserError
from ...recipe.recipe import Draft
from ...recipe.samples import TINY_VISION
from .without_videos import pictures_only

SIDE = 4
"""Patches of a draft's image in each direction, or of a square with its maximum number of pixels."""
IMAGE, START, STOP = "<|image|>", "<|image_start|>", "<|image_stop|>"


def tokenizer_of(folder: str = TINY_VISION) -> PreTrainedTokenizerBase:
    """Return the tokenizer of `tiny_vision`, which drafts borrow; it has tokens for an image's start and end."""
    tokens = {"image_token": IMAGE, "boi_token": START, "eoi_token": STOP}
    return AutoTokenizer.from_pretrained(folder, extra_special_tokens=tokens)


def processor_for(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """Return the processor of a draft, whose images are `SIDE` patches wide and high.

    Raises:
        UserError: none can be created without the model's own files.
    """
    make = _PROCESSORS.get(config.model_type)
    if make is None:
        raise UserError(
            f"--draft: a processor for {config.model_type} cannot be created without its files; drafts with images "
            f"work for {', '.join(_PROCESSORS)}."
        )
    found = make(config, tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace(IMAGE, found.image_token)
    found.chat_template = tokenizer.chat_template
    return found


def _gemma3(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    side = SIDE * config.vision_config.patch_size
    pictures = Gemma3ImageProcessorPil(size={"height": side, "width": side})
    return Gemma3Processor(pictures, tokenizer, image_seq_length=(SIDE // 2) ** 2)


def _llava(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    side = SIDE * config.vision_config.patch_size
    return LlavaProcessor(
        SiglipImageProcessorPil(size={"height": side, "width": side}),
        tokenizer,
        patch_size=config.vision_config.patch_size,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        num_additional_image_tokens=int(config.vision_config.model_type == "clip_vision_model"),
        image_token=IMAGE,
    )


def _idefics3(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    side = SIDE * config.vision_config.patch_size
    pictures = Idefics3ImageProcessorPil(size={"longest_edge": 2 * side}, max_image_size={"longest_edge": side})
    return Idefics3Processor(pictures, tokenizer, image_seq_len=(SIDE // config.scale_factor) ** 2)


def _qwen2_5_vl(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    vision = config.vision_config
    shape = {name: getattr(vision, name) for name in ("patch_size", "temporal_patch_size")}
    shape |= {"merge_size": vision.spatial_merge_size}
    token, most = vision.spatial_merge_size * vision.patch_size, SIDE * vision.patch_size
    pictures = Qwen2VLImageProcessorPil(size={"shortest_edge": token**2, "longest_edge": most**2}, **shape)
    found = pictures_only(Qwen2_5_VLProcessor)(pictures, tokenizer)
    # As in Qwen's own template: without a token between them, transformers takes two images for one.
    tokenizer.chat_template = tokenizer.chat_template.replace(IMAGE, START + IMAGE + STOP)
    found.video_settings = {"video_processor_type": "Qwen2VLVideoProcessor", **shape}
    return found


_PROCESSORS: dict[str, Callable[[PreTrainedConfig, PreTrainedTokenizerBase], ProcessorMixin]] = {
    "gemma3": _gemma3,
    "llava": _llava,
    "idefics3": _idefics3,
    "qwen2_5_vl": _qwen2_5_vl,
}


def shrink(
    config: PreTrainedConfig, text: PreTrainedConfig, draft: Draft, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedConfig:
    """Return the architecture's configuration with the draft's language part and a tower of its layers and width.

    Args:
        config: the real one.
        text: of the draft's language part.
        draft: layers and width.
        tokenizer: after its processor was created, which may add tokens.
    """
    vision = config.vision_config
    sizes: dict[str, Any] = {
        "hidden_size": draft.hidden_size,
        "intermediate_size": 2 * draft.hidden_size,
        "num_hidden_layers": draft.layers,
        "num_attention_heads": 4,
        "image_size": SIDE * vision.patch_size,
        "depth": draft.layers,
        "out_hidden_size": draft.hidden_size,
        "window_size": SIDE // 2 * vision.patch_size,
        "fullatt_block_indexes": [draft.layers - 1],
        "initializer_range": 0.02 * math.sqrt(vision.hidden_size / draft.hidden_size),
    }
    real = vision.attribute_map
    values = vision.to_dict() | {real.get(name, name): size for name, size in sizes.items() if hasattr(vision, name)}
    image = tokenizer.convert_tokens_to_ids("<image>" if config.model_type == "idefics3" else IMAGE)
    tokens = {
        "image_token_id": image,
        "image_token_index": image,
        "boi_token_index": tokenizer.convert_tokens_to_ids(START),
        "eoi_token_index": tokenizer.convert_tokens_to_ids(STOP),
        "vision_start_token_id": tokenizer.convert_tokens_to_ids(START),
        "vision_end_token_id": tokenizer.convert_tokens_to_ids(STOP),
        "mm_tokens_per_image": (SIDE // 2) ** 2,
        "image_seq_length": SIDE**2,
        "pad_token_id": tokenizer.pad_token_id,
    }
    whole = config.to_dict() | {name: token for name, token in tokens.items() if hasattr(config, name)}
    whole |= {"text_config": text.to_dict(), "vision_config": values}
    return type(config)(**{name: value for name, value in whole.items() if name not in _DERIVED})


_DERIVED = ("transformers_version", "architectures", "model_type")
