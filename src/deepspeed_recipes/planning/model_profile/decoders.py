"""Finds the language decoder that a `config.json` describes, under a `model_type` that transformers has.

Vision-language models contain a decoder next to their vision tower. Its keys are in `text_config` or, in older files of
Qwen2-VL and Qwen2.5-VL, at the top level. Models with their own code may have the same layers as a model of
transformers.
"""

from ...recipe import quantization
from ...recipe.files import Json, JsonView, text_of
from .. import TABLES

ALIKE: dict[str, str] = TABLES["alike"]
"""Decoders that transformers lacks, or has only inside a vision-language model, and a decoder with the same layers."""
VISION = ("vision_config", "audio_config")
"""Keys of the parts outside the decoder."""
NOT_ALIKE = ("architectures", "auto_map", "attn_implementation", *VISION)
"""Keys that only apply to the model's own code."""


def decoder_of(config: JsonView) -> Json:
    """Return a `config.json`'s decoder: the file, its `text_config`, or either as a model with the same layers."""
    inner = text_of(config)
    known = ALIKE.get(str(inner.get("model_type")))
    if known is None:
        return dict(inner)
    own = {key: value for key, value in inner.items() if key not in NOT_ALIKE}
    # Positions in three dimensions equal those of text if there is no image.
    if "mrope" in str(own.get("rope_scaling")) + str(own.get("rope_parameters")):
        own = {key: value for key, value in own.items() if key not in ("rope_scaling", "rope_parameters")}
    return own | {"model_type": known}


def is_stand_in(config: JsonView) -> bool:
    """Return whether `decoder_of` returns another architecture than the one in the file."""
    return str(text_of(config).get("model_type")) in ALIKE


def remark(config: JsonView, tower_counted: bool = False) -> str | None:
    """Return what a plan omits or assumes about a `config.json`'s model, as a sentence, or None.

    `tower_counted` says whether the weights of its vision tower are part of the plan.
    """
    kind, known = text_of(config).get("model_type"), decoder_of(config).get("model_type")
    parts = []
    if is_stand_in(config):
        parts.append(f"{kind} is planned as {known}, which has the same layers")
    if any(config.get(key) for key in VISION):
        what = "activations" if tower_counted else "weights and activations"
        parts.append(f"the {what} of its vision or audio tower are not counted")
    if quantized := quantization.stated(config):
        parts.append(f"the weights are quantised ({quantized}), and a run needs an unquantised copy")
    elif published := quantization.title(config):
        parts.append(f"the weights are published as {published}, and counted as a run holds them, dequantised")
    return f"About this model: {'; '.join(parts)}." if parts else None
