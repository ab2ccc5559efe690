"""Finds the recipe to plan for a model given as a recipe, a page, a Hub id or a `config.json`."""

import difflib
import json
import math
from dataclasses import asdict, replace
from pathlib import Path

from ...recipe import pages
from ...recipe.compatibility import positions
from ...recipe.dimensions import check_sizes, size_of
from ...recipe.errors import UserError, first_line
from ...recipe.files import Json, JsonView, text_of, without_attention
from ...recipe.recipe import Recipe
from ...recipe.run_folder import read_json
from ..model_profile import decoders
from ..model_profile.lookup import profile_of

MIXERS = ("mamba", "linear_", "conv_L")
"""Parts of the configuration keys of models whose layers mix tokens by other means than attention. Adapters of such
layers have names of their own, and documents cannot be packed."""


def nearest(config: JsonView, variant: str) -> Recipe:
    """Return the page's recipe of a variant that suits a model best, given the decoder's part of its config.json.

    MoE models borrow from MoE pages only, and dense models from dense pages, because adapters and layouts name the
    experts. Pages of vision-language models are never borrowed from. The criteria, in order of priority: a size within
    a factor of ten, the same `model_type`, the same mixers other than attention (state-space layers, linear attention,
    convolutions, or none), the nearest size.
    """
    own = profile_of(config)
    modules = [pages.page(family) for family in pages.families() if family != "tiny"]  # its rates suit it alone
    alike = [
        module
        for module in modules
        if not any(model.vision for model in module.SIZES.values())
        and profile_of(next(iter(module.SIZES.values())).config).is_moe == own.is_moe
    ]

    def distance(recipe: Recipe) -> tuple[bool, bool, bool, bool, float]:
        theirs = profile_of(recipe.model.config)
        size = abs(math.log(theirs.parameters / own.parameters))
        linear = [any(not kind.attention_width for kind in profile.layer_kinds) for profile in (theirs, own)]
        mixers = [{one for one in MIXERS if any(one in key for key in keys)} for keys in (recipe.model.config, config)]
        unlike = theirs.model_type != own.model_type, mixers[0] != mixers[1], linear[0] != linear[1]
        return size > math.log(10), *unlike, size

    suitable = [module for module in alike if variant in pages.variants(module)]
    recipes = [pages.build(module, size, variant) for module in suitable for size in module.SIZES]
    if not recipes:
        known = dict.fromkeys(name for module in alike for name in pages.variants(module))
        kind = "mixture of experts" if own.is_moe else "decoder"
        raise UserError(f"{variant}: no page of a {kind} has this variant; choose from: {', '.join(known)}.")
    return min(recipes, key=distance)


METHODS = ("full", "lora", "qlora")
"""In descending order of memory."""
PINNED_FILES = ("zero2_offload.json", "zero3_offload.json", "zero3_offload_params.json", "zero3_nvme.json")
"""DeepSpeed files that define a variant: `full_offload` offloads on any hardware."""
DECODERS = ("ForCausalLM", "LMHeadModel")
"""Endings of the names of Hugging Face's decoder classes."""


def find(name: str, method: str, to_launch: bool = False) -> Recipe:
    """Return the recipe that trains a model with a method, with the model's dimensions.

    A model without a page borrows that of the nearest architecture and size (`nearest`): data, rates and batch are a
    starting point. If the architecture differs, attention and chat template are not borrowed. `name` is
    `RECIPE[-SIZE]`, `PATH/TO/page.py[-SIZE]`, a Hub id, or a path to a config.json or to its folder; with `to_launch`
    transformers must load the model itself as a decoder, not only one with the same layers.
    """
    config = config_of(name)
    if config is None:
        family, _ = pages.split(name)
        own = family.endswith(".py") or family in pages.families()
        return pages.find(name if own else _page_of(name) or name, method)
    check(config, name)
    if to_launch and decoders.is_stand_in(config):
        kind, alike = text_of(config)["model_type"], _page_of(model_type=config["model_type"])
        page = f"train it with a page: ds-recipes launch {alike} lora model.path={name}"
        fix = page if alike else "it cannot be trained"
        raise UserError(f"{name}: transformers has no decoder {kind}; ds-recipes plan accepts it; {fix}.")
    inner, path = decoders.decoder_of(config), Path(name).expanduser()
    recipe = nearest(inner, method)
    if path.is_file() and path.name != "config.json":
        raise UserError(
            f"{name}: a model is a folder with a config.json; move this file to a folder of its own, as config.json."
        )
    where = str(path.parent if path.is_file() else path) if path.exists() else name
    model = replace(recipe.model, path=where, parameters=profile_of(inner).parameters, config=inner)
    if inner["model_type"] != recipe.model.config["model_type"]:
        model = replace(model, attention="auto", chat_template="auto")
    return replace(recipe, model=model, sequence_length=int(min(recipe.sequence_length, positions(inner))))


def config_of(name: str) -> Json | None:
    """Return the config.json of a model given by path or Hub id, or None if a page describes the model.

    A recipe's name is the recipe's, whatever the current folder holds; `./NAME` is the folder.
    """
    path, family = Path(name).expanduser(), pages.split(name)[0]
    if family.endswith(".py") or ("/" not in name and family in pages.families()):
        return None
    if path.exists() or name.endswith(".json"):
        file = path / "config.json" if path.is_dir() else path
        config = read_json(file)
        if not isinstance(config, dict):
            raise UserError(f"{file}: not a Hugging Face config.json, which is one JSON object.")
    elif _page_of(name):
        return None
    else:
        config = _download(name)

    def value(one: Json) -> Json | float:
        """Return infinity where transformers wrote `{"__float__": "Infinity"}`, as for Mamba."""
        return float(one["__float__"]) if set(one) == {"__float__"} else one

    found: Json = json.loads(json.dumps(without_attention(config)), object_hook=value)
    return found


def remark(name: str) -> str | None:
    """Return what a plan omits or assumes about a model, or None if nothing or if a page describes the model."""
    config = config_of(name)
    return decoders.remark(config, bool(tower_parameters(name))) if config else None


def tower_parameters(name: str) -> int:
    """Return the parameters of the vision tower of a model without a page, which its decoder's profile lacks, or 0."""
    config = config_of(name) or {}
    try:
        return profile_of(config).tower_parameters if config.get("vision_config") else 0
    except UserError:  # transformers may have the decoder alone
        return 0


def method_of(recipe: Recipe) -> str:
    """Return which of `METHODS` a recipe uses."""
    return "full" if recipe.lora is None else "lora" if recipe.model.quantization == "none" else "qlora"


def pinned(recipe: Recipe) -> frozenset[str]:
    """Return the keys that define a page's variant, which a plan must keep: its layout and its offloading."""
    sizes = {f"layout.{name}" for name, size in asdict(recipe.layout).items() if size > 1}
    return frozenset(sizes | ({"deepspeed"} if recipe.deepspeed in PINNED_FILES else set()))


def _page_of(hub_id: str = "", model_type: str = "") -> str | None:
    """Return the name of the first recipe with this Hub id or this type, or None."""
    sizes = ((f"{family}-{size}", one) for family in pages.families() for size, one in pages.page(family).SIZES.items())
    return next((name for name, one in sizes if one.path == hub_id or one.config["model_type"] == model_type), None)


def _download(hub_id: str) -> Json:
    if hub_id.count("/") != 1 or hub_id.startswith((".", "/", "~")):
        if "/" in hub_id:
            raise UserError(f"{hub_id}: no such file or folder; name a config.json or the folder that holds it.")
        known = [f"{family}-{size}" for family in pages.families() for size in pages.page(family).SIZES]
        near = difflib.get_close_matches(hub_id, [*known, *pages.families()], n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"recipes are {', '.join(pages.families())}."
        raise UserError(f"{hub_id}: not a recipe, Hub id (OWNER/NAME) or path to a config.json; {hint}")
    try:
        import huggingface_hub as hub  # takes half a second, which recipes need not wait for
    except ImportError:
        raise UserError(
            f"{hub_id}: reading from the Hub needs huggingface_hub: pip install 'deepspeed-recipes[train]'\n"
            "Or download its config.json by other means and give the path: ds-recipes plan path/to/config.json"
        ) from None
    try:
        file = hub.try_to_load_from_cache(hub_id, "config.json")
        if not isinstance(file, str):
            # A single request first: the download itself retries six times, for half a minute, and prints each attempt.
            hub.get_hf_file_metadata(hub.hf_hub_url(hub_id, "config.json"), timeout=5)
            file = hub.hf_hub_download(hub_id, "config.json", etag_timeout=5)
        config: Json = json.loads(Path(file).read_text(encoding="utf-8"))
        return config
    except Exception as error:  # no network, an unknown model and an unaccepted licence each raise another exception
        raise UserError(
            f"{hub_id}: cannot read its config.json ({first_line(error)[:120].rstrip(' .')}).\n"
            "Without a network, copy that one small file here and give its path to ds-recipes plan; to train, give the "
            "model's folder."
        ) from None


def check(config: Json, name: str) -> None:
    """Refuse models that are not decoders, and impossible sizes."""
    if not isinstance(config.get("model_type"), str):
        raise UserError(f"{name}: has no model_type, so it is not a Hugging Face model's config.json.")
    if config.get("is_encoder_decoder"):
        raise UserError(f"{name}: {config['model_type']} is an encoder-decoder; plans are for decoders only.")
    classes = config.get("architectures") or []
    classes = [classes] if isinstance(classes, str) else classes
    inner = text_of(config)
    # A vision-language model contains a decoder, and its class name may end differently.
    whole = inner is config and not decoders.is_stand_in(config)
    ends = DECODERS if whole else (*DECODERS, "ForConditionalGeneration")
    if classes and not any(str(each).endswith(ends) for each in classes):
        raise UserError(
            f"{name}: {classes[0]} is not a decoder; plans are for causal language models (...ForCausalLM)."
        )
    if not isinstance(inner, dict) or not isinstance(inner.get("model_type"), str):
        raise UserError(f"{name}: its text_config has no model_type; give the config.json of the decoder alone.")
    check_sizes(inner, name)
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads")
    width, heads, shared = (one if isinstance(one := size_of(inner, key), int) else 0 for key in names)
    if width and heads and not inner.get("head_dim") and width % heads:
        raise UserError(f"{name}: hidden_size={width} is not a multiple of num_attention_heads={heads}.")
    if heads and shared and heads % shared:
        raise UserError(f"{name}: num_attention_heads={heads} is not a multiple of num_key_value_heads={shared}.")
