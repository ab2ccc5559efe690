"""Opens images, and refuses those from which nothing could be learned, or that would fill the memory.

Pillow is imported when an image is opened, since text needs none.
"""

import importlib.util
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...recipe.errors import UserError
from .content import Picture

if TYPE_CHECKING:
    from PIL.Image import Image

LONGEST = 16_384
"""Pixels per side: the limit of graphics cards, and more than any processor keeps."""
DECODED = 1000
"""Images that the launcher decodes, which takes seconds."""
MOST = 89_478_485
"""Pixels per image, the limit above which Pillow warns: 256 MiB in three colours."""


def checked(examples: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield examples whose images can be read: the first `DECODED` are decoded, of the others the header is read.

    Without Pillow, which the launcher may lack, only the files' existence is checked; the ranks decode all images
    before they train.

    Raises:
        UserError: see `check`.
    """
    installed, count = importlib.util.find_spec("PIL") is not None, 0
    for example in examples:
        for number, picture in enumerate(example["images"], start=1):
            where = f"{example['where']}: image {number}"
            count += 1
            if installed:
                check(where, picture, whole=count <= DECODED)
            else:
                _check_there(where, picture)
        yield example


def check(where: str, picture: Picture, whole: bool = True) -> None:
    """Refuse an image that cannot be read.

    Args:
        where: identifies the image in messages.
        picture: a file or its bytes.
        whole: decode the image, which shows whether it is cut off; otherwise read only its header.

    Raises:
        UserError: missing, empty, not an image, cut off, or too large; with the place and the fix.
    """
    with _opened(where, picture) as image:
        if whole:
            _decode(where, picture, image)


def read(where: str, picture: Picture, max_pixels: int) -> "Image":
    """Return an image in RGB, with at most `max_pixels` pixels, in the same proportions.

    Raises:
        UserError: see `check`.
    """
    with _opened(where, picture) as image:
        _decode(where, picture, image)
        return within(_rgb(image), max_pixels)


def _rgb(image: "Image") -> "Image":
    """Return the image, rotated according to its camera's orientation tag, on white where it is transparent."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
        return image.convert("RGB")
    image = image.convert("RGBA")
    ground = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(ground, image).convert("RGB")


def within(image: "Image", max_pixels: int) -> "Image":
    """Return the image, reduced if it has more than `max_pixels` pixels."""
    from PIL import Image

    width, height = image.size
    if width * height <= max_pixels:
        return image
    scale = (max_pixels / (width * height)) ** 0.5
    size = (max(1, int(width * scale)), max(1, int(height * scale)))
    return image.resize(size, Image.Resampling.BICUBIC)


def blank(size: int = 56) -> "Image":
    """Return a small black image."""
    from PIL import Image

    return Image.new("RGB", (size, size))


def _opened(where: str, picture: Picture) -> "Image":
    from PIL import Image, UnidentifiedImageError

    named = _named(picture)
    path = _check_there(where, picture)
    try:
        image = Image.open(path if path is not None else io.BytesIO(picture["bytes"]))
    except UnidentifiedImageError:
        raise UserError(f"{where}{named}: not an image that Pillow reads; save it as PNG or JPEG.") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"{where}{named}: cannot be opened ({error}); save it again as PNG or JPEG.") from None
    width, height = image.size
    if max(width, height) > LONGEST or width * height > MOST:
        image.close()
        raise UserError(
            f"{where}{named}: {width:,} x {height:,} pixels; at most {LONGEST:,} on a side and {MOST:,} in all: make "
            "it smaller."
        )
    return image


def _check_there(where: str, picture: Picture) -> str | None:
    """Return the path of an image that is a file, or None if it is bytes."""
    path: str | None = picture["path"] if picture["bytes"] is None else None
    if path is not None and not Path(path).is_file():
        raise UserError(f"{where} ({path}): no such file; a relative path begins at the data file's folder.")
    return path


def _decode(where: str, picture: Picture, image: "Image") -> None:
    from PIL import Image

    try:
        image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(
            f"{where}{_named(picture)}: cut off or damaged ({error}); copy it again, or remove the example."
        ) from None


def _named(picture: Picture) -> str:
    return f" ({picture['path']})" if picture["path"] else ""
