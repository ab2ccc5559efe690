"""Detects models whose configuration declares quantised weights, from which training cannot start."""

from collections.abc import Mapping
from typing import Any

from .errors import UserError

READ: Mapping[str, tuple[str, ...]] = {"mxfp4": ("gpt_oss",)}
"""The model types that `load.quantization` dequantises on loading, by the name of the quantisation."""


def check(config: Mapping[str, Any], name: str) -> None:
    """Refuse a model whose configuration declares quantised weights, unless loading dequantises them.

    Args:
        config: the content of config.json.
        name: the key and the folder or Hub id.

    Raises:
        UserError: names the quantisation.
    """
    if method := stated(config):
        raise UserError(
            f"{name}: its weights are quantised ({method}), but training and merging need unquantised weights; name "
            "the original model (QLoRA quantises it on loading: model.quantization=nf4)."
        )


def stated(config: Mapping[str, Any]) -> str | None:
    """Return the name of the quantisation in a config.json, or None if it has none or a run can dequantise it."""
    nested = [part for part in config.values() if isinstance(part, Mapping)]  # `text_config`, `llm_config`, ...
    for part in (config, *nested):
        block = part.get("quantization_config") or part.get("compression_config")
        if isinstance(block, Mapping) and block and not is_read(config):
            bits = next((f"{bits} bits" for bits in (4, 8) if block.get(f"load_in_{bits}bit")), None)
            name = block.get("quant_method") or (bits and "bitsandbytes") or "quantization_config"
            return ", ".join(filter(None, (name, bits, block.get("format"))))
    return None


def is_read(config: Mapping[str, Any]) -> bool:
    """Return True if a model's quantised weights are dequantised on loading."""
    block = config.get("quantization_config")
    return isinstance(block, Mapping) and config.get("model_type") in READ.get(str(block.get("quant_method")), ())
