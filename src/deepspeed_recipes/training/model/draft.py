"""Creates a draft: a recipe's model shrunken and randomly initialised, with the same class and kinds of layers.

A vision-language model's tower and processor are shrunken together with its language part.
"""

import math
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
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

from ...recipe.compatibility import EXPERT_COUNTS
from ...recipe.errors import UserError
from ...recipe.files import Json, JsonView
from ...recipe.layout import DRAFT_EXPERTS, DRAFT_HEADS, draft_key_value_heads, per_layer
from ...recipe.project import SAMPLES
from ...recipe.recipe import Draft, Recipe
from ...recipe.samples import TINY_VISION
from . import heads
from .processor import pictures_only

TINY_MODEL = SAMPLES / "tiny_model"
"""The model that ships with the project; drafts borrow its tokenizer."""

ACTIVE_EXPERTS = 2
WINDOW = 32
"""Widest sliding window in tokens, so that a draft's short sequences are longer than it."""


def write(recipe: Recipe, folder: Path, dtype: torch.dtype) -> None:
    """Write the draft as a Hugging Face folder, so that every later step is the same as for the real model."""
    kind = AutoModelForCausalLM
    try:
        config = AutoConfig.for_model(**recipe.model.config)
    except Exception as error:  # configurations raise exceptions of any type for wrong values
        why = " ".join(str(error).split())[:200]
        raise UserError(f"transformers {version('transformers')} cannot read the page's model.config: {why}") from error
    reader = tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    if recipe.model.vision:
        tokens = {"image_token": IMAGE, "boi_token": START, "eoi_token": STOP}
        tokenizer = AutoTokenizer.from_pretrained(TINY_VISION, extra_special_tokens=tokens)
        reader = _processor(config, tokenizer)  # it may add tokens
        tokenizer.chat_template = tokenizer.chat_template.replace(IMAGE, reader.image_token)
        reader.chat_template = tokenizer.chat_template
    small = shrink(config, recipe.draft, tokenizer)
    if recipe.model.vision:
        small, kind = shrink_vision(config, small, recipe.draft, tokenizer), AutoModelForImageTextToText
    torch.manual_seed(recipe.seed)
    make = heads.with_further_token(small)._from_config if recipe.model.train_mtp else kind.from_config
    make(small, dtype=dtype).save_pretrained(folder)
    reader.save_pretrained(folder)


def shrink(config: PreTrainedConfig, draft: Draft, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Return the architecture's configuration with the draft's layers and width.

    Widths keep their ratio to the hidden size, rounded up to a multiple of 16. Every kind of layer of the original is
    kept, with more layers than the draft's if necessary: sliding and full attention, linear attention, state space,
    dense and expert. For a vision-language model this is the text part.
    """
    config = config.get_text_config()
    values = {name: value for name, value in config.to_dict().items() if name not in _DERIVED}
    real = config.attribute_map
    sizes = _sizes(config, draft)
    values |= {real.get(name, name): size for name, size in sizes.items() if values.get(real.get(name, name))}
    if listed := _layers(values, config.num_hidden_layers, draft.layers):
        values |= listed | {"num_hidden_layers": len(next(iter(listed.values())))}
    if rope := values.get("rope_parameters"):  # whose lists have to fit the narrower head
        pairs = int(sizes["head_dim"] * rope.get("partial_rotary_factor", 1.0)) // 2
        fitted = {name: rope[name][:pairs] for name in ("short_factor", "long_factor") if name in rope}  # LongRoPE's
        if "mrope_section" in rope:
            fitted["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
        values["rope_parameters"] = {**rope, **fitted}
    values |= {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    values["vocab_size"] = len(tokenizer)
    # Narrower layers need larger weights for outputs of the same size.
    scale = math.sqrt(config.hidden_size / draft.hidden_size)
    values |= {name: values[name] * scale for name in ("initializer_range", "init_std") if values.get(name)}
    return type(config)(**values)


_DERIVED = ("qk_head_dim", "transformers_version", "architectures")
"""Values that a configuration computes from others."""
_WIDTHS = (
    *("intermediate_size", "ffn_dim", "attention_hidden_size", "word_embed_proj_dim", "moe_intermediate_size"),
    *("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
)
"""Widths that keep their ratio to the hidden size."""


def _sizes(config: PreTrainedConfig, draft: Draft) -> dict[str, int]:
    """Return every size by its usual name; a configuration takes those that it has."""
    scaled = {}
    for name in _WIDTHS:
        width = (getattr(config, name, None) or 0) * draft.hidden_size / config.hidden_size
        scaled[name] = -int(-width // 16) * 16
    head = draft.hidden_size // DRAFT_HEADS
    heads = getattr(config, "num_attention_heads", None) or DRAFT_HEADS  # a state-space model has none
    shared = getattr(config, "num_key_value_heads", None) or heads
    latent = getattr(config, "kv_lora_rank", None)  # DeepSeek's attention: half of a head is its rotary part
    return {
        "hidden_size": draft.hidden_size,
        "num_hidden_layers": draft.layers,
        "num_attention_heads": DRAFT_HEADS,
        "num_key_value_heads": draft_key_value_heads(heads, shared),
        "head_dim": head // 2 if latent else head,
        "query_pre_attn_scalar": head,
        "rotary_dim": head // 2,
        **dict.fromkeys(EXPERT_COUNTS, DRAFT_EXPERTS),
        "num_experts_per_tok": ACTIVE_EXPERTS,
        "moe_k": ACTIVE_EXPERTS,
        "n_group": min(2, getattr(config, "n_group", None) or 2),
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": head * 2,
        "kv_lora_rank": head * 2,
        "qk_nope_head_dim": head,
        "qk_rope_head_dim": head // 2,
        "v_head_dim": head,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": DRAFT_HEADS,
        "linear_key_head_dim": head,
        "linear_value_head_dim": head,
        "sliding_window": WINDOW,
        "mamba_d_ssm": 2 * DRAFT_HEADS * head,
        "mamba_n_heads": DRAFT_HEADS,
        "mamba_num_heads": DRAFT_HEADS,
        "mamba_d_head": 2 * head,
        "mamba_head_dim": 2 * head,
        "mamba_d_state": head,
        "ssm_state_size": head,
        "n_groups": 2,  # groups of a state-space model's heads
        **scaled,
    }


def _layers(values: JsonView, before: int, layers: int) -> dict[str, list[Any]]:
    """Return a configuration's lists per layer, shortened to layers of every kind; this may be more than `layers`."""
    listed = per_layer(values, before)
    kinds = [tuple(values[name][index] for name in listed) for index in range(before)]
    first_of_kind = [index for index, kind in enumerate(kinds) if kind not in kinds[:index]]
    others = [index for index in range(before) if index not in first_of_kind] or first_of_kind
    chosen = sorted((first_of_kind + others * layers)[: max(layers, len(first_of_kind))])
    return {name: [values[name][index] for index in chosen] for name in listed}


SIDE = 4
"""Patches of a draft's image in each direction, or of a square with its maximum number of pixels."""
IMAGE, START, STOP = "<|image|>", "<|image_start|>", "<|image_stop|>"


def _processor(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """Return a processor for the small images of a draft, as the architecture's files would give one."""
    drawn = ("gemma3", "llava", "idefics3", "qwen2_5_vl")
    if config.model_type not in drawn:
        raise UserError(
            f"--draft: a processor for {config.model_type} cannot be created without its files; drafts with images "
            f"work for {', '.join(drawn)}."
        )
    vision = config.vision_config
    side = SIDE * vision.patch_size
    if config.model_type == "gemma3":
        pictures = Gemma3ImageProcessorPil(size={"height": side, "width": side})
        return Gemma3Processor(pictures, tokenizer, image_seq_length=(SIDE // 2) ** 2)
    if config.model_type == "llava":
        return LlavaProcessor(
            SiglipImageProcessorPil(size={"height": side, "width": side}),
            tokenizer,
            patch_size=vision.patch_size,
            vision_feature_select_strategy=config.vision_feature_select_strategy,
            num_additional_image_tokens=int(vision.model_type == "clip_vision_model"),
            image_token=IMAGE,
        )
    if config.model_type == "idefics3":
        pictures = Idefics3ImageProcessorPil(size={"longest_edge": 2 * side}, max_image_size={"longest_edge": side})
        return Idefics3Processor(pictures, tokenizer, image_seq_len=(SIDE // config.scale_factor) ** 2)
    shape = {name: getattr(vision, name) for name in ("patch_size", "temporal_patch_size")}
    shape |= {"merge_size": vision.spatial_merge_size}
    token = vision.spatial_merge_size * vision.patch_size
    pictures = Qwen2VLImageProcessorPil(size={"shortest_edge": token**2, "longest_edge": side**2}, **shape)
    found = pictures_only(Qwen2_5_VLProcessor)(pictures, tokenizer)
    # As in Qwen's own template: without a token between them, transformers takes two images for one.
    tokenizer.chat_template = tokenizer.chat_template.replace(IMAGE, START + IMAGE + STOP)
    found.video_settings = {"video_processor_type": "Qwen2VLVideoProcessor", **shape}
    return found


def shrink_vision(
    config: PreTrainedConfig, text: PreTrainedConfig, draft: Draft, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedConfig:
    """Return the architecture's configuration with the draft's language part and a tower of its layers and width.

    Call it after the tokenizer's processor was created, which may add tokens.
    """
    vision = config.vision_config
    sizes: Json = {
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
    derived = ("transformers_version", "architectures", "model_type")
    return type(config)(**{name: value for name, value in whole.items() if name not in derived})
