"""The model's processor, which converts images to placeholders in the text and to inputs of the tower."""

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from transformers import AutoProcessor, PreTrainedTokenizerBase, ProcessorMixin

from ...recipe.errors import UserError, first_line
from ...recipe.recipe import Recipe
from . import files, without_videos

TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets")
"""A processor's outputs for the text; all others are for the tower."""
TYPES = ("mm_token_type_ids", "token_type_ids")
"""Models' names of an input with the kind of each token, 1 for an image's."""


def of_recipe(recipe: Recipe) -> ProcessorMixin:
    """Return the processor of the recipe's model, loaded once.

    Raises:
        UserError: the model has none, or one that needs a missing package.
    """
    return load(recipe.model.path, recipe.model.trust_remote_code)


@lru_cache(maxsize=2)
def load(path: str, trust_remote_code: bool = False) -> ProcessorMixin:
    """Return the processor in a folder or of a Hub id.

    Raises:
        UserError: see `of_recipe`.
    """
    try:
        found = without_videos.load(path) or AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, TypeError, ImportError) as error:
        hint = "; install torchvision of this torch's build" if "torchvision" in str(error).lower() else ""
        raise UserError(f"model.path={path}: cannot load the processor: {first_line(error)}{hint}") from error
    if not isinstance(found, ProcessorMixin) or getattr(found, "image_token", None) is None:
        raise UserError(f"model.path={path}: has no image processor; model.vision=true needs a vision-language model.")
    return found


def adopt(processor: ProcessorMixin, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """Return the processor with the run's tokenizer and chat template, which the export then includes."""
    processor.tokenizer = tokenizer
    processor.chat_template = tokenizer.chat_template
    return processor


def text_of_pictures(processor: ProcessorMixin, pictures: Sequence[Any]) -> list[str]:
    """Return the placeholder of each image in the text that is tokenized.

    Raises:
        UserError: transformers is too old to report it.
    """
    if not pictures:
        return []
    read = _processed(processor, [pictures], return_text_replacement_offsets=True)
    if "text_replacement_offsets" not in read:
        kind = type(processor).__name__
        raise UserError(f"{kind} does not report the placeholder text of images: pip install -U 'transformers>=5.17'.")
    return [one["replacement"] for one in read["text_replacement_offsets"][0]]


def for_tower(processor: ProcessorMixin, pictures: Sequence[Sequence[Any]]) -> dict[str, torch.Tensor]:
    """Return the model's inputs for several texts' images; empty if there are none."""
    shown = [one for one in pictures if len(one)]
    if not shown:
        return {}
    read = _processed(processor, shown, return_tensors="pt", padding=True)
    return {name: value for name, value in read.items() if name not in TEXT}


def blank(processor: ProcessorMixin) -> dict[str, torch.Tensor]:
    """Return the model's inputs for one small black image."""
    return for_tower(processor, [[files.blank()]])


def token_types(processor: ProcessorMixin, accepted: Collection[str], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the kind of each token under the name of the parameter of the model's `forward`, if it has one.

    Args:
        processor: the model's.
        accepted: names of the parameters of `forward`.
        ids: [sequences, length].
    """
    name = next((name for name in TYPES if name in accepted), None)
    if name is None:
        return {}
    return {name: torch.isin(ids, torch.tensor([one for one in processor.image_token_ids if one is not None])).long()}


def _processed(processor: ProcessorMixin, pictures: Sequence[Sequence[Any]], **options: Any) -> Mapping[str, Any]:
    text = [" ".join([processor.image_token] * len(one)) for one in pictures]
    return processor(text=text, images=[list(one) for one in pictures], **options)
