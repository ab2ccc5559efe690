"""Pictures in conversations: taken out of an example before its form is read, and put back where they were.

In between a picture is one character, so that every form of `data/forms/` may hold pictures and none has to know of
them. Standard library only: the launcher reads examples with the same functions.
"""

import base64
import binascii
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ...recipe.errors import UserError
from ...recipe.methods.traits import Method
from ..data.forms import formats, keys

Picture = dict[str, Any]
"""`path` of a file, or None, and `bytes` of one, or None: as `datasets` stores an image."""

HERE = "\ufffc"
"""Stands for a picture in text: Unicode's object replacement character."""
WRITTEN = "<image>"
"""Stands for the next of the field `images` in text, as other projects write it."""
FIELDS = ("images", "image")
"""Where an example may list its pictures."""
TURNS = ("messages", "conversations", "prompt", "completion")
"""The fields whose turns may show pictures."""


def converted(
    located: Iterable[tuple[str, dict[str, Any]]], method: Method, form: str, folder: Path | None
) -> Iterator[dict[str, Any]]:
    """Yield what `formats.converted` does, with pictures: `images` in order, and `where` the example is from.

    In a turn that shows pictures the content is a list of parts, {"type": "image"} or {"type": "text", "text": ...}.

    Args:
        located: (place, example) each.
        method: which reads them.
        form: the source's, or "auto".
        folder: which the paths of pictures are relative to; None: of a source without a folder.

    Raises:
        UserError: names the place and the fix.
    """
    waiting: deque[tuple[str, list[Picture]]] = deque()

    def bare() -> Iterator[tuple[str, dict[str, Any]]]:
        for where, example in located:
            plain, pictures = taken_out(where, example, folder)
            waiting.append((where, pictures))
            yield where, plain

    for example in formats.converted(bare(), method, form):
        where, pictures = waiting.popleft()
        yield {**example, "messages": put_back(example["messages"]), "images": pictures, "where": where}


def taken_out(where: str, example: dict[str, Any], folder: Path | None) -> tuple[dict[str, Any], list[Picture]]:
    """Return an example with one character in place of each picture, and the pictures in their order.

    Raises:
        UserError: a picture that is not one, or not as many as there are places for them.
    """
    listed = _listed(where, example, folder)
    taker = _Taker(where, folder, deque(listed or ()), written=listed is not None)
    changed = {name: taker.field(value) if name in TURNS else value for name, value in example.items()}
    if taker.places != len(listed or ()):
        raise UserError(
            f"{where}: {len(listed or ())} pictures in 'images' and {taker.places} places for them; write "
            f'{WRITTEN} in the text, or {{"type": "image"}} among its parts, once for each picture.'
        )
    return {name: value for name, value in changed.items() if name not in FIELDS or listed is None}, taker.found


class _Taker:
    """Takes the pictures out of one example."""

    def __init__(self, where: str, folder: Path | None, listed: deque[Picture], written: bool) -> None:
        """Take `listed`, the pictures of the field `images`; `written`: there is one, and text has places for them."""
        self.where = where
        self.folder = folder
        self.listed = listed
        self.written = written
        self.places = 0
        self.found: list[Picture] = []

    def field(self, value: Any) -> Any:
        """Return a field without its pictures."""
        if isinstance(value, str):
            return self._text(value)
        return [self._turn(turn) for turn in value] if isinstance(value, list) else value

    def _turn(self, turn: Any) -> Any:
        if not isinstance(turn, dict):
            return turn
        return {key: self._content(value) if key in ("content", "value") else value for key, value in turn.items()}

    def _content(self, content: Any) -> Any:
        if isinstance(content, str):
            return self._text(content)
        if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
            return content
        parts = [{key: value for key, value in part.items() if value is not None} for part in content]
        if not all(keys.is_text(part) or (_is_picture(part) and not part.get("text")) for part in parts):
            return content  # `formats` says what is wrong with it
        return "".join(self._part(part) for part in parts)

    def _part(self, part: dict[str, Any]) -> str:
        if not _is_picture(part):
            return self._text(str(part["text"]))
        source = part.get("image_url")
        source = source.get("url") if isinstance(source, dict) else source
        for key in ("image", "path", "url", "bytes", "base64"):
            source = part.get(key) if source is None else source
        if source is None:
            return self._place()
        if "base64" in part:
            source = f"data:;base64,{source}"
        self.found.append(picture(f"{self.where}: picture {len(self.found) + 1}", source, self.folder))
        return HERE

    def _text(self, text: str) -> str:
        text = text.replace(HERE, "")
        if not self.written:
            return text
        before, *others = text.split(WRITTEN)
        return before + "".join(self._place() + after for after in others)

    def _place(self) -> str:
        self.places += 1
        if self.listed:
            self.found.append(self.listed.popleft())
        return HERE


def _is_picture(part: dict[str, Any]) -> bool:
    return part.get("type") in ("image", "image_url") or ("type" not in part and "image" in part)


def _listed(where: str, example: dict[str, Any], folder: Path | None) -> list[Picture] | None:
    """Return the pictures of an example's field; None: it has no such field, or it is empty."""
    name = next((name for name in FIELDS if example.get(name) is not None), None)
    if name is None:
        return None
    sources = example[name] if isinstance(example[name], list) else [example[name]]
    return [picture(f"{where}: picture {number}", one, folder) for number, one in enumerate(sources, start=1)]


def picture(where: str, source: Any, folder: Path | None) -> Picture:
    """Return a picture by its path, its bytes, or what `datasets` makes of either.

    Raises:
        UserError: a URL, which is not opened; a relative path without a folder; or nothing of the kind.
    """
    if isinstance(source, dict):
        source = source.get("bytes") or source.get("path") or source.get("url")
    if isinstance(source, bytes):
        return {"path": None, "bytes": source}
    if not isinstance(source, str) or not source:
        raise UserError(
            f"{where} is {'missing' if source is None else f'of type {type(source).__name__}'}; give the path of a "
            "file, or the bytes of one."
        )
    if source.startswith("data:"):
        return {"path": None, "bytes": _decoded(where, source)}
    if "://" in source and not source.startswith("file://"):
        raise UserError(
            f"{where} is a URL ({source[:60]}), and training opens none: a page can change, or be gone; download it, "
            "and give the path of the file."
        )
    path = Path(source.removeprefix("file://"))
    if not path.is_absolute():
        if folder is None:
            raise UserError(f"{where} is a relative path ({source}) in data without a folder; give bytes.")
        path = folder / path
    return {"path": str(path), "bytes": None}


def _decoded(where: str, source: str) -> bytes:
    try:
        return base64.b64decode(source.partition(",")[2], validate=True)
    except (binascii.Error, ValueError) as error:
        raise UserError(f"{where} is not base64 ({error}); encode the file again.") from None


def put_back(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return turns whose content is a list of parts where it shows pictures."""
    return [
        {**turn, "content": _parts(turn["content"])} if HERE in (turn.get("content") or "") else turn for turn in turns
    ]


def _parts(text: str) -> list[dict[str, str]]:
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(text.split(HERE)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts
