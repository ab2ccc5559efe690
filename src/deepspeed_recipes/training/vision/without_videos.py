"""Processors for images only, for machines without torchvision.

transformers loads a processor with all its parts, and has video processors for torchvision only; it can also process
images with Pillow. torchvision cannot be a dependency: PyPI's does not import with a CPU build of torch ("operator
torchvision::nms does not exist").
"""

import inspect
from contextlib import suppress
from typing import Any

from transformers import ProcessorMixin
from transformers.image_processing_base import ImageProcessingMixin
from transformers.models.auto.processing_auto import processor_class_from_name
from transformers.utils import is_torchvision_available
from transformers.video_processing_utils import BaseVideoProcessor

PARTS = ("self", "image_processor", "tokenizer", "video_processor", "chat_template", "kwargs")
"""Parameters of the processors that work without videos: those of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and similar models.

Others have additional options, which `_PicturesOnly` would not pass on.
"""


class _PicturesOnly(ProcessorMixin):
    video_settings: dict[str, Any] | None = None
    """The video settings in the model's files; saved with the rest, for machines with torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **kwargs: Any):
        # transformers loads and saves the parts in this signature (`ProcessorMixin.get_attributes`).
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        videos = {"video_processor": self.video_settings} if self.video_settings else {}
        return super().to_dict() | videos


def pictures_only(known: type[ProcessorMixin]) -> type[_PicturesOnly]:
    """Return a class of transformers without its video processor, under the same name, which is saved with it."""
    return type(known.__name__, (_PicturesOnly, known), {})


def load(path: str) -> ProcessorMixin | None:
    """Return the processor in a folder or of a Hub id for images only, or None if transformers can load it whole.

    Raises:
        OSError: it has none.
    """
    known = None if is_torchvision_available() else _class_of(path)
    if known is None or tuple(inspect.signature(known.__init__).parameters) != PARTS:
        return None
    found = pictures_only(known).from_pretrained(path)
    with suppress(OSError):  # it has no settings for videos
        found.video_settings, _ = BaseVideoProcessor.get_video_processor_dict(path)
    return found


def _class_of(path: str) -> type[ProcessorMixin] | None:
    """Return the class in a processor's files, found as in `AutoProcessor`, or None if it is not transformers' own."""
    files = [ProcessorMixin.get_processor_dict(path)[0]]
    with suppress(OSError):  # not a vision-language model
        files.append(ImageProcessingMixin.get_image_processor_dict(path)[0])
    name = next((one["processor_class"] for one in files if one.get("processor_class")), None)
    return processor_class_from_name(name) if name else None
