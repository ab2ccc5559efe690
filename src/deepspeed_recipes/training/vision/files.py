"""Open pictures, and refuse those that nothing could be learned from, or that would fill the memory.

Pillow is imported when a picture is opened, since text needs none.
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
"""Pixels of a side: what graphics cards hold, and more than any processor keeps."""
DECODED = 1000
"""Pictures that the launcher decodes, in seconds."""
MOST = 89_478_485
"""Pixels in all, as Pillow warns of: 256 MiB in three colours."""


def checked(examples: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield examples whose pictures can be read: the first `DECODED` as a whole, of the others the header.

    Without Pillow, which the launcher may lack, files are only looked for; the ranks decode them all before they train.

    Raises:
        UserError: see `check`.
    """
    installed, count = importlib.util.find_spec("PIL") is not None, 0
    for example in examples:
        for number, picture in enumerate(example["images"], start=1):
            where = f"{example['where']}: picture {number}"
            count += 1
            if installed:
                check(where, picture, whole=count <= DECODED)
            else:
                _check_there(where, picture)
        yield example


def check(where: str, picture: Picture, whole: bool = True) -> None:
    """Refuse a picture that cannot be read.

    Args:
        where: which picture, for messages.
        picture: a file or its bytes.
        whole: decode it, which shows whether it is cut off; else read its header only.

    Raises:
        UserError: missing, empty, not an image, cut off, or too large; with the place and the fix.
    """
    with _opened(where, picture) as image:
        if whole:
            _decode(where, picture, image)


def read(where: str, picture: Picture, max_pixels: int) -> "Image":
    """Return a picture in RGB, with at most `max_pixels` pixels, in the same proportions.

    Raises:
        UserError: see `check`.
    """
    with _opened(where, picture) as image:
        _decode(where, picture, image)
        return within(_rgb(image), max_pixels)


def _rgb(image: "Image") -> "Image":
    """Return the picture turned as its camera says, on white where it is transparent."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
        return image.convert("RGB")
    image = image.convert("RGBA")
    ground = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(ground, image).convert("RGB")


def within(image: "Image", max_pixels: int) -> "Image":
    """Return the picture, made smaller if it has more than `max_pixels` pixels."""
    from PIL import Image

    width, height = image.size
    if width * height <= max_pixels:
        return image
    scale = (max_pixels / (width * height)) ** 0.5
    size = (max(1, int(width * scale)), max(1, int(height * scale)))
    return image.resize(size, Image.Resampling.BICUBIC)


def blank(size: int = 56) -> "Image":
    """Return a small black picture."""
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
    """Return the path of a picture that is a file; None: it is bytes."""
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
