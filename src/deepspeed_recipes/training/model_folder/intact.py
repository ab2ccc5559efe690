"""Refuses a model or adapter folder with files that are unreadable, cut off or not what their names say.

Without torch and transformers, as `weights`. transformers and its libraries leave out the file's name, ignore such a
file, or fail with an error of their own kind for each.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

from ...recipe import files
from ...recipe.errors import FileUnusable, UserError, of_system
from ...recipe.run_folder import read_json
from . import weights

_OBJECTS = re.compile(
    r"(?:adapter_|generation_|tokenizer_|preprocessor_|processor_|video_preprocessor_)?config\.json|tokenizer\.json"
    r"|special_tokens_map\.json|added_tokens\.json|vocab\.json|base_quantization\.json|.*\.safetensors\.index\.json"
)
_TEMPLATE = re.compile(r".*\.jinja")
_TEXTS = re.compile(r"merges\.txt|vocab\.txt")
_WEIGHTS = re.compile(r"(?:adapter_)?model(?:-\d+-of-\d+)?\.safetensors")
_BINARY = re.compile(r".*\.(?:model|tiktoken)")
_LINE = re.compile(r"^(?=\d+:)")
_SHOWN = 3
_AGAIN = "copy or download it again"


def check(place: str | Path) -> None:
    """Refuse a folder with files of a model, an adapter or a tokenizer that cannot be used.

    Weights are checked by their headers. What is no folder (a Hub id) is not checked.
    """
    folder = Path(place)
    if not folder.is_dir():
        return
    bad = []
    for name in sorted(os.listdir(folder)):
        read = next((read for pattern, read in _READERS.items() if pattern.fullmatch(name)), None)
        if read and (error := _error(folder / name, read)):
            bad.append(error)
    if len(bad) == 1:
        raise bad[0]
    if bad:
        shown = ", ".join(_short(error, folder) for error in bad[:_SHOWN])
        more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise UserError(f"{folder}: {len(bad)} files cannot be used: {shown}{more}; copy or download them again.")


def _error(file: Path, read: Callable[[Path], object]) -> UserError | None:
    """Return why a file cannot be used, with the file's name and a fix."""
    try:
        read(file)
    except UserError as error:
        text = str(error)
        return error if ";" in text else type(error)(f"{text.removesuffix('.')}; {_AGAIN}.")
    except OSError as error:
        return FileUnusable(of_system(error, file))
    return None


def _short(error: UserError, folder: Path) -> str:
    """Return `config.json (line 3: not JSON ...)` of an error about a file in a folder."""
    name, _, reason = str(error).removeprefix(f"{folder}{os.sep}").partition(";")[0].partition(":")
    return f"{name} ({_LINE.sub('line ', reason.strip())})"


def _start(file: Path) -> bytes:
    """Return the first bytes of a file that is no pointer of Git LFS."""
    with file.open("rb") as opened:
        start = opened.read(8)
    if start == b"version ":
        raise UserError(f"{file}: Git LFS's pointer, not the file; run `git lfs pull` there.")
    return start


def _object(file: Path) -> None:
    _start(file)
    if not isinstance(read_json(file), dict):
        raise UserError(f"{file}: not one JSON object; {_AGAIN}.")


def _text(file: Path) -> str:
    files.check_ends(file)
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{file}: not UTF-8 text; {_AGAIN}.") from None
    if not text.strip():
        raise UserError(f"{file}: is empty; {_AGAIN}, or remove it.")
    return text


def _template(file: Path) -> None:
    text = _text(file)
    import jinja2

    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=False).parse(text)
    except jinja2.TemplateSyntaxError as error:
        if "unknown tag" not in str(error):  # transformers adds {% generation %}
            reason = str(error.message).rstrip(".")
            raise UserError(f"{file}:{error.lineno}: not a template ({reason}); {_AGAIN}.") from None


def _weights(file: Path) -> None:
    files.check_ends(file)
    weights.header(file)


def _binary(file: Path) -> None:
    files.check_ends(file)
    if not _start(file):
        raise UserError(f"{file}: is empty; {_AGAIN}.")


_READERS = {_OBJECTS: _object, _TEMPLATE: _template, _TEXTS: _text, _WEIGHTS: _weights, _BINARY: _binary}
