"""Writes smaller copies of models: their kinds, with the library that writes each and the programs that load it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ...recipe.errors import UserError

Option = Literal["--quantize", "--gguf"]


@dataclass(frozen=True)
class Kind:
    """A format that `ds-recipes export` can write."""

    option: Option
    name: str
    title: str
    quantizer: Literal["llm-compressor", "bitsandbytes", "llama.cpp", "deepspeed-recipes"]
    """The library that writes it: bitsandbytes in the training environment, the others in the serving environment."""
    scheme: str
    """The library's name for it."""
    loads_in: str
    wider: str = ""
    """The kinds that lose less."""
    calibrated: bool = False
    """Weights are rounded so that the outputs on examples change least (GPTQ, arXiv:2210.17323)."""

    @property
    def typed(self) -> str:
        """The kind as on the command line."""
        return f"{self.option} {self.name}"


DROP = 2.0
"""Percentage points of the metric that a smaller model may lose; percent if the metric is the loss."""
SERVERS = "vLLM, and transformers with compressed-tensors"
TRAINING = "transformers with bitsandbytes"
LLAMA = "llama.cpp, and Ollama (ollama create NAME -f Modelfile)"

KINDS: Mapping[tuple[Option, str], Kind] = {
    (kind.option, kind.name): kind
    for kind in (
        Kind("--quantize", "int8", "8-bit weights and activations", "llm-compressor", "W8A8", SERVERS, "", True),
        Kind("--quantize", "int4", "4-bit weights", "llm-compressor", "W4A16", SERVERS, "int8 or fp8 lose less", True),
        Kind("--quantize", "fp8", "8-bit floating-point weights and activations", "llm-compressor", "FP8_DYNAMIC",
             SERVERS),
        Kind("--quantize", "nf4", "4-bit normal-float weights", "bitsandbytes", "nf4", TRAINING,
             "int8-bitsandbytes loses less"),
        Kind("--quantize", "int8-bitsandbytes", "8-bit weights", "bitsandbytes", "int8", TRAINING),
        Kind("--quantize", "fp8-block", "8-bit floating-point weights in blocks of 128 x 128", "deepspeed-recipes",
             "fp8", "vLLM, SGLang and transformers on GPUs with FP8"),
        Kind("--gguf", "f16", "16-bit weights", "llama.cpp", "f16", LLAMA),
        Kind("--gguf", "q8_0", "8-bit weights", "llama.cpp", "q8_0", LLAMA, "f16 loses less"),
        Kind("--gguf", "q4_k_m", "4-bit weights, and 6 bits where they count most", "llama.cpp", "q4_k_m", LLAMA,
             "q8_0 and f16 lose less"),
    )
}  # fmt: skip
"""The kinds by option and name."""

UNROUNDED = Kind("--gguf", "f32", "32-bit weights", "llama.cpp", "f32", LLAMA)
"""To compare llama.cpp's computation with the trained model's; no kind to choose."""


def names(option: Option) -> list[str]:
    """Return the names of an option's kinds."""
    return [name for one, name in KINDS if one == option]


def find(option: Option, name: str) -> Kind:
    """Return the kind with this name."""
    if (option, name) not in KINDS:
        raise UserError(f"{option} {name}: choose {', '.join(names(option))}.")
    return KINDS[option, name]
