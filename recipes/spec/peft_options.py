"""Adapters in PEFT's words."""

from typing import Any

from .recipe import Lora, names


def lora_options(lora: Lora) -> dict[str, Any]:
    """Return the arguments of `peft.LoraConfig`."""
    modules = names(lora.target_modules)
    return {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": "all-linear" if modules == ["all-linear"] else modules,
        "target_parameters": names(lora.target_parameters) or None,
        "use_dora": lora.dora,
        "task_type": "CAUSAL_LM",
    }
