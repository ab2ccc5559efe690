"""A vision-language model's tower, which is frozen by default, and a blank image for ranks that have none.

Every rank's tower must run in every pass, before the text. Under ZeRO-3 a module's forward pass gathers its weights
from all ranks, and below it ranks reduce their gradients in the order in which they are ready. If one rank's batch has
no image, its collectives do not match the others': over NCCL the run hangs, over gloo it crashes. So such a rank
computes a black image, and adds 0 times the result to its text.
"""

import re
from collections.abc import Iterator, Mapping
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
    decoder: object = model.get_decoder()
    name = next(name for name, module in model.named_modules() if module is decoder)
    return rf"(?!{re.escape(name)}\.).*"


def always_see(model: PreTrainedModel, picture: Mapping[str, torch.Tensor]) -> None:
    """Make `model` compute `picture` in every forward pass without images, except for tokens after the first.

    The hooks are on inner modules, since PEFT calls the outermost model's `forward` without its hooks.

    Args:
        model: with a tower.
        picture: its inputs for one image, including `pixel_values`.
    """
    inner, decoder = model.base_model, model.get_decoder()
    batch = {"seen": False}

    def look(_: object, __: object, inputs: dict[str, torch.Tensor]) -> None:
        batch["seen"] = inputs.get("pixel_values") is not None

    def add_nothing(
        _: object, arguments: object, inputs: dict[str, torch.Tensor]
    ) -> tuple[Any, dict[str, torch.Tensor]] | None:
        cache, embedded = inputs.get("past_key_values"), inputs.get("inputs_embeds")
        if batch["seen"] or embedded is None or (cache is not None and cache.get_seq_length()):
            return None
        on_device = {
            name: value.to(embedded.device, embedded.dtype if value.is_floating_point() else None)
            for name, value in picture.items()
        }
        seen = inner.get_image_features(**on_device, return_dict=True).pooler_output
        nothing = sum(one.float().mean() for one in _tensors(seen)) * 0.0
        return arguments, {**inputs, "inputs_embeds": embedded + nothing.to(embedded.dtype)}

    inner.register_forward_pre_hook(look, with_kwargs=True)
    decoder.register_forward_pre_hook(add_nothing, with_kwargs=True)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if torch.is_tensor(value):
        yield value
    else:
        for one in value:
            yield from _tensors(one)
