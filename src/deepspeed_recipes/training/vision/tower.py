"""The parts of a vision-language model: its vision tower, which is frozen by default, and its language part."""

import re
from typing import Any

import torch
from transformers import PreTrainedModel

from ...recipe.errors import UserError

NAMES = ("vision_tower", "visual", "vision_model", "multi_modal_projector", "connector")
"""Names of the tower, and of the module that projects its outputs, in models."""


def of_model(model: PreTrainedModel) -> torch.nn.Module:
    """Return the vision tower.

    Raises:
        UserError: transformers finds none in the model.
    """
    found = model.get_encoder(modality="image")
    if found is model or found is model.base_model:
        raise UserError(f"model.vision=true: transformers names no vision tower in {model.config.model_type}.")
    return found


def freeze(model: PreTrainedModel) -> None:
    """Freeze the tower; the module that projects its outputs is still trained, unless it is part of the tower."""
    for parameter in of_model(model).parameters():
        parameter.requires_grad_(False)


def outside_language(model: PreTrainedModel) -> str:
    """Return a regular expression for the modules outside the language part, in the form for PEFT's exclusions."""
    decoder: Any = model.get_decoder()
    name = next(name for name, module in model.named_modules() if module is decoder)
    return rf"(?!{re.escape(name)}\.).*"
