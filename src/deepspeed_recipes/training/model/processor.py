"""The model's processor, which converts images to placeholders and to inputs of the tower; and the vision tower.

transformers loads a processor with all its parts, and has video processors for torchvision only; it can also process
images with Pillow. torchvision cannot be a dependency: PyPI's does not import with a CPU build of torch ("operator
torchvision::nms does not exist"). So machines without it get processors for images only.

The tower is frozen by default. Every rank's tower must run in every pass, before the text. Under ZeRO-3 a module's
forward pass gathers its weights from all ranks, and below it ranks reduce their gradients in the order in which they
are ready. If one rank's batch has no image, its collectives do not match the others': over NCCL the run hangs, over
gloo it crashes. So such a rank computes a black image, and adds 0 times the result to its text.
"""

import inspect
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch
from peft import PeftModel
from torch.utils._pytree import tree_leaves
from transformers import AutoProcessor, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.image_processing_base import ImageProcessingMixin
from transformers.models.auto.processing_auto import processor_class_from_name
from transformers.utils import is_torchvision_available
from transformers.video_processing_utils import BaseVideoProcessor

from ...recipe.errors import UserError, first_line
from ...recipe.files import Json, JsonView
from ...recipe.recipe import Recipe

NAMES = ("vision_tower", "visual", "vision_model", "multi_modal_projector", "connector")
"""Names of the tower, and of the module that projects its outputs, in models."""


def freeze(model: PreTrainedModel) -> None:
    """Freeze the tower; the module that projects its outputs is still trained, unless it is part of the tower."""
    tower = model.get_encoder(modality="image")
    if tower is model or tower is model.base_model:
        raise UserError(f"model.vision=true: transformers names no vision tower in {model.config.model_type}.")
    tower.requires_grad_(False)


def always_see(model: PreTrainedModel, processor: ProcessorMixin) -> None:
    """Make `model` compute a black picture in every forward pass without images, except for tokens after the first.

    The hooks are on inner modules, since PEFT calls the outermost model's `forward` without its hooks.
    """
    from PIL import Image  # text needs none

    picture = for_tower(processor, [[Image.new("RGB", (56, 56))]])
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
        nothing = sum(one.float().mean() for one in tree_leaves(seen)) * 0.0
        return arguments, {**inputs, "inputs_embeds": embedded + nothing.to(embedded.dtype)}

    inner.register_forward_pre_hook(look, with_kwargs=True)
    decoder.register_forward_pre_hook(add_nothing, with_kwargs=True)


TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets")
"""A processor's outputs for the text; all others are for the tower."""
TYPES = ("mm_token_type_ids", "token_type_ids")
"""Models' names of an input with the kind of each token, 1 for an image's."""


def of_recipe(recipe: Recipe) -> ProcessorMixin:
    """Return the processor of the recipe's model, loaded once."""
    return load(recipe.model.path, recipe.model.trust_remote_code)


@lru_cache(maxsize=2)
def load(path: str, trust_remote_code: bool = False) -> ProcessorMixin:
    """Return the processor in a folder or of a Hub id."""
    try:
        found = load_without_videos(path) or AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
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


def text_of_pictures(processor: ProcessorMixin, pictures: Sequence[object]) -> list[str]:
    """Return the placeholder of each image in the text that is tokenized."""
    if not pictures:
        return []
    read = _processed(processor, [pictures], return_text_replacement_offsets=True)
    if "text_replacement_offsets" not in read:
        kind = type(processor).__name__
        raise UserError(f"{kind} does not report the placeholder text of images: pip install -U 'transformers>=5.17'.")
    return [one["replacement"] for one in read["text_replacement_offsets"][0]]


def for_tower(processor: ProcessorMixin, pictures: Sequence[Sequence[object]]) -> dict[str, torch.Tensor]:
    """Return the model's inputs for several texts' images; empty if there are none."""
    shown = [one for one in pictures if len(one)]
    if not shown:
        return {}
    read = _processed(processor, shown, return_tensors="pt", padding=True)
    return {name: value for name, value in read.items() if name not in TEXT}


def token_types(processor: ProcessorMixin, accepted: Collection[str], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the kind of each token in `ids`, [sequences, length], under its name in the model's `forward`.

    It is empty if none of the `accepted` parameters is for it.
    """
    name = next((name for name in TYPES if name in accepted), None)
    if name is None:
        return {}
    return {name: torch.isin(ids, torch.tensor([one for one in processor.image_token_ids if one is not None])).long()}


def accepted_by(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of the parameters of a model's `forward`."""
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    return frozenset(inspect.signature(type(inner).forward).parameters)


def _processed(processor: ProcessorMixin, pictures: Sequence[Sequence[object]], **options: object) -> JsonView:
    text = [" ".join([processor.image_token] * len(one)) for one in pictures]
    return processor(text=text, images=[list(one) for one in pictures], **options)


PARTS = ("self", "image_processor", "tokenizer", "video_processor", "chat_template", "kwargs")
"""Parameters of the processors that work without videos: those of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and similar models.

Others have additional options, which `_PicturesOnly` would not pass on.
"""


class _PicturesOnly(ProcessorMixin):
    video_settings: Json | None = None
    """The video settings in the model's files; saved with the rest, for machines with torchvision."""

    def __init__(
        self, image_processor: object = None, tokenizer: object = None, chat_template: object = None, **kwargs: object
    ):
        # transformers loads and saves the parts in this signature (`ProcessorMixin.get_attributes`).
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template, **kwargs)

    def to_dict(self) -> Json:
        videos = {"video_processor": self.video_settings} if self.video_settings else {}
        return super().to_dict() | videos


def pictures_only(known: type[ProcessorMixin]) -> type[_PicturesOnly]:
    """Return a class of transformers without its video processor, under the same name, which is saved with it."""
    return type(known.__name__, (_PicturesOnly, known), {})


def load_without_videos(path: str) -> ProcessorMixin | None:
    """Return the processor in a folder or of a Hub id for images only, or None if transformers can load it whole."""
    if is_torchvision_available():
        return None
    files = [ProcessorMixin.get_processor_dict(path)[0]]
    with suppress(OSError):  # not a vision-language model
        files.append(ImageProcessingMixin.get_image_processor_dict(path)[0])
    name = next((one["processor_class"] for one in files if one.get("processor_class")), None)
    known = processor_class_from_name(name) if name else None  # as in `AutoProcessor`; None: not transformers' own
    if known is None or tuple(inspect.signature(known.__init__).parameters) != PARTS:
        return None
    found = pictures_only(known).from_pretrained(path)
    with suppress(OSError):  # it has no settings for videos
        found.video_settings, _ = BaseVideoProcessor.get_video_processor_dict(path)
    return found
