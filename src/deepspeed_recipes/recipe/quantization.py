"""Detects quantised weights from a model's configuration: which of them a run dequantises, and which it refuses."""

from collections.abc import Mapping

from .errors import UserError
from .files import JsonView

COMPRESSED = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
"""The formats of compressed-tensors that are dequantised: fp8 and int8 with scales, and packed integers."""


def check(config: JsonView, name: str) -> None:
    """Refuse a model whose config.json declares quantised weights, unless loading dequantises them.

    `name` is the key and the folder or Hub id.
    """
    if method := stated(config):
        raise UserError(
            f"{name}: its weights are quantised ({method}), but training and merging need unquantised weights; name "
            "the original model (QLoRA quantises it on loading: model.quantization=nf4)."
        )


def stated(config: JsonView) -> str | None:
    """Return the name of the quantisation in a config.json, or None if it has none or a run can dequantise it."""
    block = block_of(config)
    if block is None or is_read(config):
        return None
    bits = next((f"{bits} bits" for bits in (4, 8) if block.get(f"load_in_{bits}bit")), None)
    name = block.get("quant_method") or (bits and "bitsandbytes") or "quantization_config"
    return ", ".join(filter(None, (name, bits, block.get("format"))))


def block_of(config: JsonView) -> JsonView | None:
    """Return the description of the quantisation in a config.json, or None if it has none."""
    nested = [part for part in config.values() if isinstance(part, Mapping)]  # `text_config`, `llm_config`, ...
    for part in (config, *nested):
        block = part.get("quantization_config") or part.get("compression_config")
        if isinstance(block, Mapping) and block:
            return block
    return None


def is_read(config: JsonView) -> bool:
    """Return True if a model's quantised weights are dequantised on loading: FP8, MXFP4 or compressed-tensors."""
    block = block_of(config) or {}
    method = block.get("quant_method")
    if method == "mxfp4":
        return config.get("model_type") == "gpt_oss"  # others store it under other names
    if method == "compressed-tensors":
        sparse = (block.get("sparsity_config") or {}).get("format", "dense") != "dense"
        return block.get("format") in COMPRESSED and bool(block.get("config_groups")) and not sparse
    return method == "fp8"


def title(config: JsonView) -> str | None:
    """Return the name of the quantisation that a run removes on loading, or None if there is none."""
    block = block_of(config)
    if block is None or not is_read(config):
        return None
    return ", ".join(filter(None, (block["quant_method"], block.get("format"))))
