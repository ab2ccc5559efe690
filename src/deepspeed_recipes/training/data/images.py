"""Images in conversations: removed from an example before its form is read, and put back in their places.

In between an image is one character, so that every form of `data/forms/` may contain images without supporting them.
Standard library only: the launcher reads examples with the same functions. Pillow is imported when an image is opened,
since text needs none.
"""

import base64
import importlib.util
import io
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...recipe.errors import UserError, counted
from ...recipe.files import Json
from .forms import formats, keys
from .text_files import Bad, refuse

Picture = Json
"""An image as stored by `datasets`: `path` of its file, or None, and its `bytes`, or None."""

HERE = "\ufffc"
"""Represents an image in text: Unicode's object replacement character."""
WRITTEN = "<image>"
"""Represents the next image of the field `images` in text, as in other projects."""
FIELDS = ("images", "image")
SOURCES = ("image", "bytes", "base64", "path", "url")
"""The keys of a part of a turn that hold its image, in addition to `image_url`."""
"""Fields in which an example may list its images."""
TURNS = ("messages", "conversations", "prompt", "completion")
"""The fields whose turns may contain images."""


def converted(
    located: Iterable[tuple[str, Json]],
    method: str,
    form: str,
    folder: Path | None,
    bad: Bad | None = None,
    first: str | None = None,
) -> Iterator[Json]:
    """Yield the examples of `formats.converted` with images: `images` in order, and `where`, the example's place.

    In a turn with images the content is a list of parts, {"type": "image"} or {"type": "text", "text": ...}. The
    images' paths are relative to `folder`, which some sources lack.
    """
    latest: list[object] = ["", []]

    def bare() -> Iterator[tuple[str, Json]]:
        for where, example in located:
            try:
                plain, latest[1] = taken_out(where, example, folder)
            except UserError as error:
                refuse(error, bad)
                continue
            latest[0] = where
            yield where, plain

    for example in formats.converted(bare(), method, form, bad, first):
        where, pictures = latest
        turns = []
        for turn in example["messages"]:
            if HERE in (turn.get("content") or ""):
                pieces = filter(None, re.split(f"({HERE})", turn["content"]))
                parts = [{"type": "image"} if one == HERE else {"type": "text", "text": one} for one in pieces]
                turn = {**turn, "content": parts}
            turns.append(turn)
        yield {**example, "messages": turns, "images": pictures, "where": where}


def taken_out(where: str, example: Json, folder: Path | None) -> tuple[Json, list[Picture]]:
    """Return an example with one character in place of each image, and the images in their order."""
    listed, found, places = _listed(where, example, folder), list[Picture](), 0
    left = deque(listed or ())

    def place() -> str:
        nonlocal places
        places += 1
        found.extend([left.popleft()] if left else [])
        return HERE

    def in_text(text: str) -> str:
        before, *others = text.replace(HERE, "").split(WRITTEN) if listed is not None else [text.replace(HERE, "")]
        return before + "".join(place() + after for after in others)

    def in_content(content: object) -> object:
        if isinstance(content, str):
            return in_text(content)
        if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
            return content
        parts = [{key: value for key, value in part.items() if value is not None} for part in content]
        if not all(keys.is_text(part) or (_is_picture(part) and not part.get("text")) for part in parts):
            return content  # `formats` reports the error
        text = ""
        for part in parts:
            source = part.get("image_url")
            source = source.get("url") if isinstance(source, dict) else source
            named = [key for key in ("image_url", *SOURCES) if part.get(key)]
            if len(named) > 1 and named != ["bytes", "path"]:  # as `datasets` has an image
                raise UserError(f"{where}: a part has {' and '.join(named)}, each of which is an image; keep one.")
            for key in SOURCES:
                source = part.get(key) if source is None else source
            if not _is_picture(part):
                text += in_text(str(part["text"]))
            elif source is None:
                text += place()
            else:
                source = f"data:;base64,{source}" if "base64" in part else source
                found.append(picture(f"{where}: image {len(found) + 1}", source, folder))
                text += HERE
        return text

    changed = dict(example)
    for name in (name for name in TURNS if name in example):  # in the order of the conversation, not of the keys
        value = example[name]
        if isinstance(value, str):
            changed[name] = in_text(value)
        elif isinstance(value, list):
            changed[name] = [
                {key: in_content(one) if key in ("content", "value") else one for key, one in turn.items()}
                if isinstance(turn, dict)
                else turn
                for turn in value
            ]
    if places != len(listed or ()):
        raise UserError(
            f"{where}: {counted(len(listed or ()), 'image')} in 'images', but {counted(places, 'place')}; write "
            f'{WRITTEN} in the text, or {{"type": "image"}} among its parts, once for each image '
            "(data.transform=FILE.py:FUNCTION can)."
        )
    return {name: value for name, value in changed.items() if name not in FIELDS or listed is None}, found


def _is_picture(part: Json) -> bool:
    return part.get("type") in ("image", "image_url") or ("type" not in part and "image" in part)


def _listed(where: str, example: Json, folder: Path | None) -> list[Picture] | None:
    """Return the images of an example's field, or None if it has no such field or the field is empty."""
    given = [name for name in FIELDS if example.get(name) not in keys.EMPTY]
    if len(given) == 2:
        raise UserError(f"{where}: has 'images' and 'image', which mean the same; remove one of them.")
    name = next((name for name in FIELDS if example.get(name) is not None), None)
    if name is None:
        return None
    sources = example[name] if isinstance(example[name], list) else [example[name]]
    return [picture(f"{where}: image {number}", one, folder) for number, one in enumerate(sources, start=1)]


def picture(where: str, source: object, folder: Path | None) -> Picture:
    """Return an image given by its path, its bytes, or the form of `datasets`; a URL is refused."""
    if isinstance(source, dict):
        source = source.get("bytes") or source.get("path") or source.get("url")
    if isinstance(source, bytes):
        return {"path": None, "bytes": source}
    if not isinstance(source, str) or not source:
        found = "missing" if source in (None, "") else f"of type {type(source).__name__}"
        raise UserError(f"{where} is {found}; give the path of a file, or the bytes of one.")
    if source.startswith("data:"):
        try:
            return {"path": None, "bytes": base64.b64decode(source.partition(",")[2], validate=True)}
        except ValueError as error:
            raise UserError(f"{where} is not base64 ({error}); encode the file again.") from None
    if "://" in source and not source.startswith("file://"):
        raise UserError(
            f"{where} is a URL ({source[:60]}), which training does not open, since its content can change; download "
            "it, and give the path of the file."
        )
    path = Path(source.removeprefix("file://"))
    if not path.is_absolute():
        if folder is None:
            raise UserError(f"{where} is a relative path ({source}) in data without a folder; give bytes.")
        path = folder / path
    return {"path": str(path), "bytes": None}


if TYPE_CHECKING:
    from PIL.Image import Image

LONGEST = 16_384
"""Pixels per side: the limit of graphics cards, and more than any processor keeps."""
DECODED = 1000
"""Images that the launcher decodes, which takes seconds."""
MOST = 89_478_485
"""Pixels per image, the limit above which Pillow warns: 256 MiB in three colours."""


def checked(examples: Iterable[Json], bad: Bad | None = None) -> Iterator[Json]:
    """Yield examples whose images can be read: the first `DECODED` are decoded, of the others the header is read.

    Without Pillow, which the launcher may lack, only the files' existence is checked; the ranks decode all images
    before they train. `bad` is called with the errors of examples, which are otherwise raised.
    """
    installed, count = importlib.util.find_spec("PIL") is not None, 0
    for example in examples:
        try:
            for number, picture in enumerate(example["images"], start=1):
                where = f"{example['where']}: image {number}"
                count += 1
                if installed:
                    check(where, picture, whole=count <= DECODED)
                else:
                    _check_there(where, picture)
        except UserError as error:
            refuse(error, bad)
        else:
            yield example


def check(where: str, picture: Picture, whole: bool = True) -> None:
    """Refuse an image that cannot be read; only `whole` decoding shows whether it is cut off."""
    with _opened(where, picture) as image:
        if whole:
            _decode(where, picture, image)


def read(where: str, picture: Picture, max_pixels: int) -> "Image":
    """Return an image in RGB, with at most `max_pixels` pixels, in the same proportions.

    It is rotated according to its camera's orientation tag, and on white where it is transparent.
    """
    from PIL import Image, ImageOps

    with _opened(where, picture) as opened:
        _decode(where, picture, opened)
        image = ImageOps.exif_transpose(opened)
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
        return within(image.convert("RGB"), max_pixels)


def read_all(where: str, pictures: Sequence[Json], max_pixels: int) -> list["Image"]:
    """Return an example's images as Pillow's images."""
    return [read(f"{where}: image {n}", one, max_pixels) for n, one in enumerate(pictures, start=1)]


def within(image: "Image", max_pixels: int) -> "Image":
    """Return the image, reduced if it has more than `max_pixels` pixels."""
    from PIL import Image

    width, height = image.size
    if width * height <= max_pixels:
        return image
    scale = (max_pixels / (width * height)) ** 0.5
    size = (max(1, int(width * scale)), max(1, int(height * scale)))
    return image.resize(size, Image.Resampling.BICUBIC)


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
    wrong, most = None, image.getextrema()[1] if image.mode[0] in "IF" else 0
    if getattr(image, "is_animated", False) and image.format != "MPO":  # cameras' JPEGs, with a preview
        wrong = f"{getattr(image, 'n_frames', 2)} frames or pages, of which one would be read; save each as an image"
    elif image.mode == "F" or (isinstance(most, int | float) and most > 255):
        wrong = f"more than 8 bits per colour ({image.mode}), which would be cut off to white or black; save it with 8"
    if wrong:
        raise UserError(f"{where}{_named(picture)}: has {wrong}, or remove the example.")


def _named(picture: Picture) -> str:
    return f" ({picture['path']})" if picture["path"] else ""
