"""Borrowed recipes: `launch auto MODEL` takes the nearest page's; `model.path=` may name a model that needs another."""

import json
import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ...planning.model_profile import decoders
from ...planning.model_profile.lookup import profile_of
from ...planning.search import model_recipe
from ...planning.search.model_recipe import nearest
from ...recipe import overrides, pages
from ...recipe.errors import UserError
from ...recipe.files import Json
from ...recipe.recipe import Model, Recipe
from ...recipe.run_folder import read_json
from ...training.data import updates
from ..plan import workload

FAR = 10
"""Ratio of parameter counts above which a recipe's settings no longer suit a model."""
SETTINGS = ("learning_rate", "precision", "sequence_length")
"""Settings that depend most on the model."""


@dataclass(frozen=True)
class Found:
    """The properties of a model that are found without loading it."""

    kinds: tuple[str, ...] = ()
    """The `model_type` of the model and of its text model; empty if unknown."""
    parameters: float | None = None
    exact: bool = True
    """True if the parameters were counted, False if their number is from the model's name."""


def warning(recipe: Recipe, page: Recipe, given: Collection[str]) -> str | None:
    """Return a warning if a recipe runs a model unlike its page's with the page's settings, or None.

    `recipe` has the model's path as the ranks open it, `page` is the recipe before the user changed it, and `given` are
    the keys that the user has set.
    """
    borrowed = [key for key in SETTINGS if key not in given]
    if "model.path" not in given or recipe.draft.enabled or not borrowed:
        return None
    found, theirs = look(recipe.model.path), page.model
    same_kind = not found.kinds or theirs.config.get("model_type") in found.kinds
    if same_kind and not (found.parameters and _distance(found, theirs) > math.log(FAR)):
        return None
    about = "" if found.exact else "about "
    size = [f"{about}{pages.human(round(found.parameters))} parameters"] if found.parameters else []
    # What fits has the same architecture, or else the family in the name, at the nearest size.
    own = [(name, model) for name, model in _models() if model.config.get("model_type") in found.kinds]
    title = Path(recipe.model.path).name.lower()
    alike = [(name, model) for name, model in _models() if re.match(r"[a-z]+", name)[0] in title]  # type: ignore[index]
    near = [
        (name, distance)
        for name, model in own or alike
        if recipe.variant in pages.variants(pages.page(pages.split(name)[0]))
        and (distance := _distance(found, model)) <= math.log(FAR)
    ]
    advice = " Set these for your model."
    if near:
        name, _ = min(near, key=lambda one: one[1])
        advice = f"\nWhat fits: ds-recipes launch {name} {recipe.variant} model.path={recipe.model.path}"
    return (
        f"warning: a borrowed recipe: {' '.join(overrides.as_typed(recipe, borrowed))} are the settings of "
        f"{pages.typed(page)}, a {theirs.config.get('model_type')} with {pages.human(theirs.parameters)} parameters; "
        f"{recipe.model.path} is {' with '.join([*found.kinds[:1], *size]) or 'another model'}.{advice}"
    )


def look(path: str) -> Found:
    """Return a model's properties from its folder or, for a Hub id, from its page or its name."""
    folder = Path(path)
    if folder.is_dir():
        config = read_json(folder / "config.json")
        kinds = (config.get("model_type"), (config.get("text_config") or {}).get("model_type"))
        return Found(tuple(kind for kind in kinds if kind), sum(map(_elements, folder.glob("*.safetensors"))) or None)
    for _, model in _models():
        if model.path == path:
            return Found((model.config["model_type"],), model.parameters)
    named = re.search(r"(?<![\d.])(\d+(?:\.\d+)?)([BbMm])(?![a-zA-Z])", path)
    return Found((), float(named[1]) * (1e9 if named[2] in "Bb" else 1e6) if named else None, exact=False)


def _elements(file: Path) -> int:
    """Return the number of elements in a safetensors file's header, or 0 if the file is damaged."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(min(length, 2**27)))
        return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return 0  # the ranks report the error


def _distance(found: Found, model: Model) -> float:
    """Return the distance between two sizes as a logarithm, or 0 if a size is unknown."""
    return abs(math.log(found.parameters / model.parameters)) if found.parameters and model.parameters else 0.0


def _models() -> Iterator[tuple[str, Model]]:
    """Yield every model of the catalogue with its recipe's name, except the tiny models."""
    for family in pages.families():
        if not family.startswith("tiny"):
            yield from ((f"{family}-{size}", model) for size, model in pages.page(family).SIZES.items())


TAKEN = ("learning_rate", "schedule.kind", "weight_decay", "global_batch_size", "sequence_length", "deepspeed")
ADAPTERS = ("lora.rank", "lora.alpha", "lora.target_modules")
"""Keys that are printed if the recipe has adapters."""


def borrow(model: str, variant: str) -> Recipe:
    """Return the recipe for a model's folder or Hub id with the model's dimensions: its own page's, or the nearest.

    If the model's architecture is not the page's, a test with a shrunken model decides if documents are packed. Other
    models than decoders are refused.
    """
    if "/" not in model and Path(model).is_dir():
        model = f"./{model}"  # not the recipe of this name
    config = model_recipe.config_of(model)
    if config and "auto_map" in config:
        from transformers import CONFIG_MAPPING  # a second, which only such models wait for

        kind = str(config.get("model_type"))
        if kind not in CONFIG_MAPPING and not decoders.is_stand_in(config):
            alike = nearest({**config, "model_type": "llama"}, "full")
            raise UserError(
                f"{model}: transformers has no {kind}; the model brings its own Python code. Read that code; if you "
                f"trust it:\nds-recipes launch {pages.typed(alike)} {variant} model.path={model} "
                "model.trust_remote_code=true"
            )
    recipe = (_with_vision(model, config, variant) if config else None) or model_recipe.find(
        model, variant, to_launch=True
    )
    if not pages.is_own_model(recipe):
        path = Path(recipe.model.path).expanduser()
        parts = path.resolve().parts if path.exists() else Path(recipe.model.path).parts
        if len(parts) > 2 and parts[-2] == "snapshots":  # the Hub's cache: models--OWNER--NAME/snapshots/REVISION
            title = re.sub(r"[^\w.-]+", "_", parts[-3].rpartition("--")[2])
        else:
            title = re.sub(r"[^\w.-]+", "_", parts[-1]).strip("._-") or "model"
        recipe = replace(recipe, borrower=title)
    if not recipe.packs:
        return recipe
    page = pages.find(pages.typed(recipe), recipe.variant)  # with whose architecture packing is tested
    if page.model.config["model_type"] == recipe.model.config["model_type"]:
        return recipe
    from transformers import AutoConfig, AutoTokenizer  # takes seconds, and only such models need it

    from ...training.model import attention, draft, probe

    shape = AutoConfig.for_model(**recipe.model.config)
    tokenizer = AutoTokenizer.from_pretrained(draft.TINY_MODEL)
    try:
        # The last candidate is the implementation that a run uses if no faster one is correct.
        apart = probe.keeps_documents_apart(shape, tokenizer, attention.candidates(recipe, shape, on_gpu=False)[-1])
    except Exception:  # a model's own code may raise any error; without packing the model may still train
        apart = False
    return recipe if apart else replace(recipe, packing=False)


def with_amount(recipe: Recipe, ranks: int, given: Collection[str]) -> Recipe:
    """Return the recipe with a batch, epochs and logging that suit the size of the user's data; print them."""
    size = workload.size_of(recipe) if "data.path" in given and not recipe.data.streaming else None
    if size is None:
        return recipe
    found = updates.suited(recipe, size, ranks, given)
    steps = updates.in_all(found, size.of(found))
    if changes := overrides.differences(recipe, found):
        about, how = ("about ", ", estimated from each file's first examples") if size.estimated else ("", "")
        print(
            f"for {about}{size.examples:,} examples, {size.tokens:,} tokens in all{how}: {' '.join(changes)} (about "
            f"{steps} updates); set any of these yourself",
            flush=True,
        )
    return found


def said(recipe: Recipe, given: Collection[str]) -> str:
    """Return a text with the borrowed page, the settings that it provides, and its other variants.

    `recipe` is as before the user's changes; the keys in `given`, which the user sets, are not borrowed.
    """
    page = pages.find(pages.typed(recipe), recipe.variant)
    kind, other = (one.model.config["model_type"] for one in (recipe, page))
    left = {*given, "model.path"}
    own = [change for change in overrides.differences(page, recipe) if change.partition("=")[0] not in left]
    replaced = {*given, *overrides.keys_of(own)}
    names = [key for key in (*TAKEN, *(ADAPTERS if page.lora else ())) if key not in replaced]
    taken = overrides.as_typed(page, names)
    module = pages.page_of(page)
    lines = [
        f"auto: {recipe.model.path} ({kind}, {pages.human(recipe.model.parameters)} parameters) borrows the recipe "
        f"{pages.typed(page)} {page.variant} ({other}, {pages.human(page.model.parameters)})",
        *([f"borrowed: {' '.join(taken)}"] if taken else []),
        *([f"the model's own: {' '.join(own)}"] if own else []),
        f"other variants: {', '.join(name for name in pages.variants(module) if name != page.variant)}",
    ]
    return "\n      ".join(lines)


def _with_vision(name: str, config: Json, variant: str) -> Recipe | None:
    """Return the recipe of the nearest vision-language model of the same architecture, or None if no page has one."""
    kind = config.get("model_type")
    if not config.get("vision_config"):
        return None
    model_recipe.check(config, name)
    found = [
        pages.build(module, size, variant)
        for module in map(pages.page, pages.families())
        if variant in pages.variants(module)
        for size, model in module.SIZES.items()
        if model.vision and model.config.get("model_type") == kind and not module.__name__.startswith("tiny")
    ]
    if not found:
        return None
    own = profile_of(decoders.decoder_of(config)).parameters
    recipe = min(
        found, key=lambda one: abs(math.log(own / profile_of(decoders.decoder_of(one.model.config)).parameters))
    )
    path = Path(name).expanduser()
    where = str(path.parent if path.is_file() else path) if path.exists() else name
    parameters = own + model_recipe.tower_parameters(name)
    return replace(recipe, model=replace(recipe.model, path=where, parameters=parameters, config=config))
