"""Other training software: where its memory and time differ from this project's under the same settings."""

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Software:
    """Differences from this project, whose software has the defaults."""

    fsdp: bool = False
    """FSDP shards the model instead of ZeRO-3: layer by layer, and 4-bit weights while loading rather than after."""
    logit_bytes: float | None = None
    """Bytes per token and vocabulary entry of whole, uncapped logits. None uses the profile."""
    frozen_fp32: bool = False
    """Weights that are not in 4 bits and activations between layers are in fp32, after PEFT's
    `prepare_model_for_kbit_training`."""
    fp32_activations: bool = False
    """Activations between 4-bit matrices are in fp32, after the same function and without autocast's help."""
    fp32_adapters: bool = False
    """Adapters are in fp32 next to a model in bf16: PEFT's default."""
    foreach_adam: bool = False
    """Adam on the GPU is a series of operations instead of one kernel, as in torch without `fused`."""
    tensor_splits_all: bool = False
    """Tensor-parallel ranks divide all activations and the logits, as in Megatron (arXiv:2205.05198) and in torchtitan.
    DeepSpeed's AutoTP only divides the activations inside a layer's matrices."""
    grouped_experts: bool = True
    """All experts of a layer are computed in one product, as in transformers 5; otherwise one after the other."""
    quantized_experts: bool = False
    """Routed experts are in 4 bits too: the case for experts made of linear layers (transformers before 5), but not for
    fused experts."""


OWN = Software()
KNOWN: Mapping[str, Software] = {
    "peft": Software(logit_bytes=16, frozen_fp32=True, fp32_activations=True, fp32_adapters=True),
    "trl": Software(logit_bytes=14, fp32_adapters=True, foreach_adam=True),
    "llama-factory": Software(logit_bytes=18, fp32_adapters=True, foreach_adam=True),
    "fsdp": Software(logit_bytes=14, fp32_adapters=True, foreach_adam=True, fsdp=True),
    "transformers-4": Software(logit_bytes=14, foreach_adam=True, grouped_experts=False, quantized_experts=True),
    "megatron": Software(tensor_splits_all=True),
}
"""By the name in `plan.py software=NAME`: PEFT in an own loop or Trainer, TRL's SFTTrainer, LLaMA-Factory, TRL
with FSDP, transformers before 5, and Megatron. Values are those that most published runs of each have
(scripts/maintain/measurements)."""


def named(name: str, quantized: bool) -> Software:
    """Return the software of this name for a model with or without 4-bit weights, which PEFT prepares in fp32."""
    found = KNOWN[name]
    return found if quantized else replace(found, frozen_fp32=False, fp32_activations=False)
