"""The parts of a model that sees: its vision tower, which is frozen unless asked otherwise, and its language part."""

import re
from typing import Any

import torch
from transformers import PreTrainedModel

from ...recipe.errors import UserError

NAMES = ("vision_tower", "visual", "vision_model", "multi_modal_projector", "connector")
"""What models call their tower, and what projects its outputs."""


def of_model(model: PreTrainedModel) -> torch.nn.Module:
    """Return the vision tower.

    Raises:
        UserError: the model has none that transformers knows.
    """
    found = model.get_encoder(modality="image")
    if found is model or found is model.base_model:
        raise UserError(f"model.vision=true: transformers names no vision tower in {model.config.model_type}.")
    return found


def freeze(model: PreTrainedModel) -> None:
    """Freeze the tower; what projects its outputs is still trained, except where it is a part of the tower."""
    for parameter in of_model(model).parameters():
        parameter.requires_grad_(False)


def outside_language(model: PreTrainedModel) -> str:
    """Return a regular expression for the modules that are not in the language part, as PEFT excludes them."""
    decoder: Any = model.get_decoder()
    name = next(name for name, module in model.named_modules() if module is decoder)
    return rf"(?!{re.escape(name)}\.).*"
