"""The kinds of quantised models, with the library that writes each and the programs that load it."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A format that `ds-recipes export --quantize` can write."""

    name: str
    title: str
    quantizer: str
    """The library that writes it."""
    scheme: str
    """The library's name for it."""
    calibrated: bool
    """Weights are rounded so that the outputs on examples change least (GPTQ, arXiv:2210.17323)."""
    loads_in: str


DROP = 2.0
"""Percentage points of the metric that a quantised model may lose; percent if the metric is the loss."""
_SERVERS = "vLLM, and transformers with compressed-tensors"
_TRAINING = "transformers with bitsandbytes"

KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("int8", "8-bit weights and activations", "llm-compressor", "W8A8", True, _SERVERS),
        Kind("int4", "4-bit weights", "llm-compressor", "W4A16", True, _SERVERS),
        Kind("fp8", "8-bit floating-point weights and activations", "llm-compressor", "FP8_DYNAMIC", False, _SERVERS),
        Kind("nf4", "4-bit normal-float weights", "bitsandbytes", "nf4", False, _TRAINING),
        Kind("int8-bitsandbytes", "8-bit weights", "bitsandbytes", "int8", False, _TRAINING),
    )
}
"""The kinds by name. llm-compressor is in the serving environment, bitsandbytes in the training environment."""
