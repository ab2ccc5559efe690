"""Reads dimensions from a model's `config.json` like transformers, with each model type's names and defaults.

GPT-2 has `n_embd` instead of `hidden_size`, and a nested text configuration omits the defaults of its class.
`model_types.json` holds both for every model type of transformers (`scripts/maintain/schema/model_types.py`), so that
nothing here imports transformers.
"""

import json
from functools import cache
from pathlib import Path

from ..recipe.errors import UserError
from ..recipe.files import Json
from ..recipe.run_folder import read_json

MODEL_TYPES = Path(__file__).with_name("model_types.json")
DIMENSIONS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config", "decoder", "generator")


@cache
def _types() -> dict[str, Json]:
    types: dict[str, Json] = json.loads(MODEL_TYPES.read_text())
    return types


def dimension(model: Json, name: str) -> int | None:
    """Return one of DIMENSIONS, without looking into nested configs, or None if it is unknown."""
    known = _types().get(str(model.get("model_type")), {})
    own, default = known.get(name, (name, None))
    for value in (model.get(name), model.get(own), default):
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def text_model(model: Json) -> Json:
    """Return the part of a model's config that holds the sizes of the language model."""
    for name in _NESTED:
        if isinstance(inner := model.get(name), dict):
            return text_model(inner)
    kind = _types().get(str(model.get("model_type")), {}).get("text_config")
    return {"model_type": kind} if kind else model


def hidden_size(model: Json, nested: bool = True) -> int | None:
    """Return the hidden size that the Trainer finds in a model's config, the largest if there are several.

    The Trainer also looks into `text_config`; a bare Accelerator does not (`nested=False`).
    """
    if (size := dimension(model, "hidden_size")) is not None:
        return size
    sizes = model.get("hidden_sizes")
    if isinstance(sizes, list) and sizes and all(isinstance(size, int) for size in sizes):
        return int(max(sizes))
    kind = _types().get(str(model.get("model_type")), {}).get("text_config")
    inner = model.get("text_config", {"model_type": kind} if kind else None)
    if not nested or not isinstance(inner, dict):
        return None
    return hidden_size({"model_type": kind, **inner}, nested=False)


def model_config(path: str | Path) -> Json:
    """Return the `config.json` at `path`, or in the folder `path`.

    Raises:
        UserError: it cannot be read, or is not a JSON object.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    config = read_json(file)
    if not isinstance(config, dict):
        raise UserError(f"{file}: a model's config.json is a JSON object.")
    return config
