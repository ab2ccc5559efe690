"""The language decoder that a `config.json` describes, under a `model_type` that transformers knows as a decoder.

Vision-language models hold one beside their vision tower, in `text_config` or, as Qwen2-VL's and Qwen2.5-VL's older
files, among their own keys. Models that bring their own code may compute what a model of transformers does.
"""

from collections.abc import Mapping
from typing import Any

from ...recipe import quantization

ALIKE = {
    "kimi_k2": "deepseek_v3",
    "internlm2": "llama",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "mllama_text_model": "llama",
}
"""Decoders that transformers has under no name, or only inside a model that sees, and what has the same layers.

InternLM2 stores queries, keys and values as one matrix. A layer of Llama 3.2 Vision that attends to the picture has the
same matrices as one that attends to the text, and is counted as one.
"""
VISION = ("vision_config", "audio_config")
"""Keys of what is beside the decoder."""
NOT_ALIKE = ("architectures", "auto_map", "attn_implementation", *VISION)
"""Keys that belong to the model's own code."""


def decoder_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the decoder's configuration: the file itself, its `text_config`, or that of a model with the same layers.

    Args:
        config: a whole `config.json`.
    """
    inner = inner_of(config)
    known = ALIKE.get(str(inner.get("model_type")))
    if known is None:
        return dict(inner)
    own = {key: value for key, value in inner.items() if key not in NOT_ALIKE}
    # Positions in three dimensions are those of text where there is no picture.
    if "mrope" in str(own.get("rope_scaling")) + str(own.get("rope_parameters")):
        own = {key: value for key, value in own.items() if key not in ("rope_scaling", "rope_parameters")}
    return own | {"model_type": known}


def inner_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `text_config` where there is one, as it is."""
    return config.get("text_config") or config


def is_stand_in(config: Mapping[str, Any]) -> bool:
    """Return whether `decoder_of` returns another architecture than the file names."""
    return str(inner_of(config).get("model_type")) in ALIKE


def sees(config: Mapping[str, Any]) -> bool:
    """Return whether there is a vision tower or the like beside the decoder."""
    return any(config.get(key) for key in VISION)


def remark(config: Mapping[str, Any]) -> str | None:
    """Return what a plan leaves out of a model, or takes for it; None: nothing."""
    kind, known = inner_of(config).get("model_type"), decoder_of(config).get("model_type")
    parts = []
    if is_stand_in(config):
        parts.append(f"{kind} is planned as {known}, which has the same layers")
    if sees(config):
        parts.append("what sees or hears beside the decoder (its tower's weights and activations) is left out")
    if quantized := quantization.stated(config):
        parts.append(f"the weights are quantised ({quantized}), and a run needs an unquantised copy")
    return f"Of this model, {'; '.join(parts)}." if parts else None
