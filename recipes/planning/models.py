"""What a plan is wanted for: a recipe, a Hub id or a `config.json`, as a recipe that holds the model's dimensions."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipes.planning.trace import anatomy
from recipes.spec import pages
from recipes.spec.errors import UserError, first_line
from recipes.spec.limits import positions
from recipes.spec.recipe import Recipe
from recipes.spec.run_folder import read_json

METHODS = ("full", "lora", "qlora")
DECODERS = ("ForCausalLM", "LMHeadModel")
"""How Hugging Face's classes of decoders end."""
SIZES = {
    "hidden_size": ("n_embd", 10**6),
    "num_hidden_layers": ("n_layer", 2000),
    "num_attention_heads": ("n_head", 10**5),
    "num_key_value_heads": ("", 10**5),
    "head_dim": ("", 10**5),
    "intermediate_size": ("n_inner", 10**7),
    "vocab_size": ("", 10**8),
    "max_position_embeddings": ("n_positions", 10**9),
}
"""Of a config.json: the name that GPT-2's and BLOOM's use for it, and what no model comes near."""


def find(name: str, method: str) -> Recipe:
    """Return the recipe that trains a model by a method.

    Args:
        name: `RECIPE[-SIZE]`, a Hub id, or a path to a config.json or to its folder.
        method: of `METHODS`.

    Raises:
        UserError: there is no such model, it cannot be read, it is no decoder, or it does not go with the method.
    """
    path = Path(name).expanduser()
    if path.exists() or name.endswith(".json"):
        config = _read(path)
    else:
        known = name if name.partition("-")[0] in pages.families() else _page_of(name)
        if known:
            return pages.find(known, method)
        config = _download(name)
    check(config, name)
    return stand_in(name, config, method)


def _page_of(hub_id: str) -> str | None:
    """Return the recipe whose weights are a Hub id's."""
    sizes = ((family, size, model) for family in pages.families() for size, model in pages.page(family).SIZES.items())
    return next((f"{family}-{size}" for family, size, model in sizes if model.path == hub_id), None)


def _read(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    config = read_json(file)
    if not isinstance(config, dict):
        raise UserError(f"{file}: not a Hugging Face config.json, which is one JSON object.")
    return config


def _download(hub_id: str) -> dict[str, Any]:
    if hub_id.count("/") != 1 or hub_id.startswith((".", "/", "~")):
        if "/" in hub_id:
            raise UserError(f"{hub_id}: no such file or folder; name a config.json or the folder that holds it.")
        raise UserError(_unknown(hub_id))
    import huggingface_hub as hub  # half a second that no recipe waits for

    try:
        file = hub.try_to_load_from_cache(hub_id, "config.json")
        if not isinstance(file, str):
            # Asked for once: the download itself asks six times, for half a minute, and says so each time.
            hub.get_hf_file_metadata(hub.hf_hub_url(hub_id, "config.json"), timeout=5)
            file = hub.hf_hub_download(hub_id, "config.json", etag_timeout=5)
        return json.loads(Path(file).read_text(encoding="utf-8"))
    except Exception as error:  # no network, no such model, a licence to accept: all say it in their own way
        raise UserError(
            f"{hub_id}: its config.json cannot be had ({first_line(error)[:120].rstrip(' .')}).\n"
            "Without a network, get that one small file in any way and give its path: plan.py path/to/config.json"
        ) from None


def _unknown(name: str) -> str:
    known = [f"{family}-{size}" for family in pages.families() for size in pages.page(family).SIZES]
    near = difflib.get_close_matches(name, [*known, *pages.families()], n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"recipes are {', '.join(pages.families())}."
    return f"{name}: no recipe, Hub id (OWNER/NAME) or path to a config.json; {hint}"


def check(config: Mapping[str, Any], name: str) -> None:
    """Refuse what is no decoder, and sizes that no model can have.

    Raises:
        UserError: names the file, the key and its value.
    """
    if not isinstance(config.get("model_type"), str):
        raise UserError(f"{name}: has no model_type, so it is not a Hugging Face model's config.json.")
    if config.get("is_encoder_decoder"):
        raise UserError(f"{name}: {config['model_type']} is an encoder with a decoder; plans are for decoders only.")
    classes = config.get("architectures") or []
    classes = [classes] if isinstance(classes, str) else classes
    inner = config.get("text_config") or config
    # What sees and reads has a decoder inside, and ends like what only generates.
    ends = DECODERS if inner is config else (*DECODERS, "ForConditionalGeneration")
    if classes and not any(str(each).endswith(ends) for each in classes):
        raise UserError(f"{name}: {classes[0]} is no decoder; plans are for causal language models (...ForCausalLM).")
    if not isinstance(inner, dict) or not isinstance(inner.get("model_type"), str):
        raise UserError(f"{name}: its text_config has no model_type; give one of the decoder alone.")
    for key, (other, most) in SIZES.items():
        value = inner.get(key, inner.get(other))
        if isinstance(value, list | None):  # layer by layer; transformers knows whether that may be
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{name}: {key}={value}: must be a whole number of at least 1.")
        if value > most:
            raise UserError(f"{name}: {key}={value}: no model has so much; at most {most:,}.")
    _check_heads(inner, name)


def _check_heads(config: Mapping[str, Any], name: str) -> None:
    width, heads = (config.get(key, config.get(SIZES[key][0])) for key in ("hidden_size", "num_attention_heads"))
    shared = config.get("num_key_value_heads")
    if width and heads and not config.get("head_dim") and width % heads:
        raise UserError(f"{name}: hidden_size={width} is not a multiple of num_attention_heads={heads}.")
    if heads and shared and heads % shared:
        raise UserError(f"{name}: num_attention_heads={heads} is not a multiple of num_key_value_heads={shared}.")


def stand_in(name: str, config: Mapping[str, Any], method: str) -> Recipe:
    """Return a recipe for a model without a page: of the same architecture if there is one, and as near in size.

    Its data, rates and batch are a start; `model.path` is the model's own.
    """
    inner = config.get("text_config") or config
    parameters = anatomy(inner).parameters
    chosen = [pages.find(f"{family}-{size}", method) for family, size in _pages_for(inner["model_type"], method)]
    recipe = min(chosen, key=lambda recipe: abs(recipe.model.parameters - parameters))
    path = Path(name).expanduser()
    if path.is_file() and path.name != "config.json":
        raise UserError(f"{name}: a model is a folder with a config.json; give this file that name, in one of its own.")
    folder = path.parent if path.is_file() else path
    where = str(folder) if path.exists() else name
    model = replace(recipe.model, path=where, parameters=parameters, config=dict(inner))
    return replace(recipe, model=model, sequence_length=min(recipe.sequence_length, positions(inner)))


def _pages_for(model_type: str, method: str) -> list[tuple[str, str]]:
    sizes = [
        (family, size, model.config.get("model_type"))
        for family in pages.families()
        for size, model in pages.page(family).SIZES.items()
        if family != "tiny" and method in pages.variants(pages.page(family))
    ]
    same = [(family, size) for family, size, kind in sizes if kind == model_type]
    return same or [(family, size) for family, size, _ in sizes if family == "llama3"]
