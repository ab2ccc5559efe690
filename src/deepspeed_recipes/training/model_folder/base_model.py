"""The base model of an adapter: records it without a path of this machine, and finds it again."""

import os
import re
from pathlib import Path, PurePath

from ...recipe.errors import UserError
from ...recipe.files import Json
from ...recipe.run_folder import read_json, write_json
from .portable import own_path, portable_path

ADAPTER = "adapter_config.json"
QUANTIZATION = "base_quantization.json"
"""File next to an adapter that was trained on a quantised base model: how to quantise it again."""
KEY = "base_model_name_or_path"
EXPECTED = "expected.json"
"""File of a folder that holds what the trained model answered (see `expected.py`)."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def config_of(folder: Path) -> Json:
    """Return the content of a folder's config.json, or an empty one if it has none.

    Raises:
        UserError: it is not one JSON object.
    """
    file = folder / "config.json"
    config = read_json(file) if file.exists() else {}
    if not (isinstance(config, dict) and isinstance(config.get("text_config") or {}, dict)):
        raise UserError(f"{file}: not a Hugging Face config.json, which is one JSON object.")
    return config


def text_of(config: Json) -> Json:
    """Return the part of a config.json that describes the text model: `text_config`, or the whole without one."""
    return config.get("text_config") or config


def is_hub_id(name: str) -> bool:
    """Return whether a portable name is one of the Hub's, `OWNER/NAME`, and not a file of the project."""
    return bool(_HUB_ID.fullmatch(name)) and own_path(name) is None


def make_portable(folder: Path, place: Path) -> None:
    """Name the base model of the adapter in `folder` so that it can be found from there, if it is named by a path.

    A model of the project keeps its place in the checkout, one in Hugging Face's cache gets its Hub id, and any other
    is named relative to the adapter (`../draft_model`): both can be moved together.

    Args:
        folder: holds the adapter; a whole model is left as it is.
        place: the folder that it will be renamed to.
    """
    config = folder / ADAPTER
    if not config.exists():
        return
    values = read_json(config)
    name = str(values.get(KEY) or "")
    if PurePath(name).is_absolute():
        moved = portable_path(name)
        if moved == PurePath(name).name:  # neither the project's nor the Hub's
            moved = os.path.relpath(name, place.resolve())
        write_json(config, values | {KEY: moved})


def find(adapter: Path) -> Path:
    """Return the folder or the Hub id of an adapter's base model.

    Raises:
        UserError: adapter_config.json names a folder that does not exist.
    """
    name = str(read_json(adapter / ADAPTER)[KEY])
    if own := own_path(name):
        return own
    if PurePath(name).is_absolute():
        places = [Path(name)]
    else:  # relative to the adapter or, from other tools, to the folder in which they ran: one above the adapter
        places = [(folder / name).resolve() for folder in (adapter, *adapter.resolve().parents)]
    found = next((place for place in places if (place / "config.json").is_file()), None)
    if found is None and (name.startswith(".") or PurePath(name).is_absolute()):
        if not places[0].is_dir():
            raise UserError(
                f"{adapter / ADAPTER}: the base model {name} does not exist ({places[0]}); correct {KEY}, or name the "
                "base model yourself (ds-recipes generate BASE_MODEL --adapter DIR)."
            )
        found = places[0]
    return found or Path(name)


def located(name: str) -> Path:
    """Return the folder of a recipe's model, whose path may be portable; a Hub id is returned unchanged."""
    return own_path(name) or Path(name)
