"""Writes README.md of an exported folder: a model card in the Hub's form, from the content of the folder."""

import re
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ...recipe import deepspeed_file, overrides, pages
from ...recipe.errors import UserError, printable, redact
from ...recipe.methods import method
from ...recipe.recipe import Recipe, names
from ...recipe.run_folder import read_json
from . import base_model, record
from .base_model import ADAPTER, KEY, QUANTIZATION, is_hub_id
from .record import Record, portable_path, portable_recipe

FILE = "README.md"
TEMPLATE = Path(__file__).parent / "card.md.jinja"
UNPUBLISHED = "OWNER/NAME"
"""Name of the model in the usage snippet until it has a name on the Hub."""


@dataclass(frozen=True)
class Contents:
    """Properties of a folder that its card mentions."""

    adapter: bool
    base: str
    """The adapter's name of its base model; empty for a whole model."""
    scores: bool
    """True for a reward model, which gives a conversation a number, and for a classifier."""
    labels: tuple[str, ...]
    """The names of a classifier's classes."""
    embeds: bool
    """True for an embedding model, which has no head."""
    quantized: bool
    """True if the adapter's base is loaded in 4 bits."""
    chat: bool
    """True if the tokenizer has a chat template."""
    gguf: str | None = None
    """The name of a GGUF file with the whole model."""
    sees: bool = False
    """True for a vision-language model with its processor."""
    inside: bool = False
    """True for an adapter of the text part that is named for the whole model."""
    untouched: tuple[str, ...] = ()
    """The parts that are the base model's, such as its vision tower where only text was trained."""
    mtp: tuple[str, ...] = ()
    """The parts among them that predict further tokens."""


def write(folder: Path, name: str = UNPUBLISHED) -> bool:
    """Write the card of an exported folder, or return False if its training is not recorded."""
    held = record.read(folder)
    if held is None:
        return False
    make(folder, held, name).save(folder / FILE)
    return True


def make(folder: Path, held: Record, name: str) -> ModelCard:
    """Return the card of an exported folder."""
    contents = look(folder)
    recipe, results = held.recipe, held.results
    data = metadata(held, contents)
    environment = results.get("environment") or {}
    file = folder / record.FOLDER / record.DEEPSPEED
    path = recipe.model.path
    if recipe.draft.enabled:
        base = f"a randomly initialised model of the architecture of {recipe.family}-{recipe.size}, shrunken "
        base += "(`--draft`)"
    elif is_hub_id(path):
        base = f"[{path}](https://huggingface.co/{path})"
    else:
        base = code(redact(path))
    command = ["python", "scripts/launch.py", pages.typed(recipe), recipe.variant]
    command += ["--draft"] * recipe.draft.enabled
    command += ["--gpus", str(environment.get("world_size") or 1), *changes(recipe)]
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=name,
        code=code,
        plain=plain,
        recipe=recipe,
        results=results,
        contents=contents,
        drafts=base_model.DRAFTS,
        base=base,
        hub_base=data.base_model,
        base_licence=licence_of_base(recipe),
        sources=[redact(source) for source in names(recipe.data.path)],
        validation=redact(recipe.data.validation or ""),
        stage=deepspeed_file.read(str(file)).stage if file.exists() else None,
        score=(lambda value: score(results.get("metric"), value)),
        quantised_score=(lambda value: score(results[record.QUANTIZATION].get("metric"), value)),
        environment=environment,
        command=redact(shlex.join(command)),
    )


def look(folder: Path) -> Contents:
    """Return the properties of a folder."""
    adapter = read_json(folder / ADAPTER, {})
    tokenizer = read_json(folder / "tokenizer_config.json", {})
    whole = read_json(folder / base_model.PROVENANCE, {})
    head = base_model.head_of(folder)
    return Contents(
        adapter=bool(adapter),
        base=str(adapter.get(KEY) or ""),
        scores=head == "scores",
        labels=tuple(base_model.labels_of(folder)),
        embeds=head == "none",
        sees=head == "vision",
        inside=bool((adapter.get("auto_mapping") or {}).get("base_model_class")),
        untouched=tuple(whole.get("parts", ())),
        mtp=tuple(whole.get("mtp", ())),
        quantized=(folder / QUANTIZATION).exists(),
        chat=(folder / "chat_template.jinja").exists() or bool(tokenizer.get("chat_template")),
        gguf=next((file.name for file in folder.glob("*.gguf")), None),
    )


def metadata(held: Record, contents: Contents) -> ModelCardData:
    """Return the card's YAML, without names that the Hub cannot resolve, such as a local base model."""
    recipe = held.recipe
    known = is_hub_id(recipe.model.path) and not recipe.draft.enabled
    adapters = ["lora"] * (recipe.lora is not None) + ["dora"] * bool(recipe.lora and recipe.lora.dora)
    relation = "adapter" if contents.adapter else "finetune"
    scores = None
    metric, after = held.results.get("metric"), held.results.get("after")
    if metric and after is not None:
        scores = EvalResult(
            task_type=task(contents),
            dataset_type=redact(names(recipe.data.validation or recipe.data.path)[0]),
            dataset_name="held-out examples",
            metric_type=metric,
            metric_name=method.title(metric),
            metric_value=after,
        )
    library = "sentence-transformers" if contents.embeds else "peft" if contents.adapter else "transformers"
    licence = (licence_of_base(recipe) or "").lower()
    return ModelCardData(
        **({"base_model": recipe.model.path, "base_model_relation": relation} if known else {}),
        license=_HUB_NAMES.get(licence, "other") if licence else None,
        license_name=licence.replace(" ", "-") if licence and licence not in _HUB_NAMES else None,
        datasets=[name for name in names(recipe.data.path) if is_hub_id(name)] or None,
        library_name="gguf" if contents.gguf else library,
        pipeline_tag=task(contents),
        tags=["deepspeed", "deepspeed-recipes", recipe.method.name, *adapters],
        model_name=recipe.name,
        eval_results=[scores] if scores else None,
    )


def task(contents: Contents) -> str:
    """Return the Hub's name of the model's task."""
    if contents.embeds:
        return "sentence-similarity"
    if contents.sees:
        return "image-text-to-text"
    return "text-classification" if contents.scores else "text-generation"


def code(text: object) -> str:
    """Return text as code in a line of Markdown or a table's cell; a model's folder may hold any text."""
    line = " ".join(printable(text).split()).replace("|", "\\|")
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    return f"{fence} {line} {fence}" if "`" in line else f"{fence}{line}{fence}"


def plain(text: object) -> str:
    """Return text for a line of Markdown or a table's cell, with all special characters escaped."""
    return re.sub(r"([\\`*\[\]<>|#&!~])", r"\\\1", " ".join(printable(text).split()))


def score(metric: str | None, value: object) -> str:
    """Return a score in readable form, or a dash if there is none."""
    if not isinstance(value, int | float):
        return "-"
    return method.shown(str(metric), value)


_HUB_NAMES = {
    "apache-2.0": "apache-2.0",
    "mit": "mit",
    "gemma": "gemma",
    "llama-2": "llama2",
    "llama-3.1": "llama3.1",
    "llama-3.2": "llama3.2",
    "llama-3.3": "llama3.3",
    "bigscience-bloom-rail-1.0": "bigscience-bloom-rail-1.0",
}
"""A page's licence in small letters -> its identifier on the Hub (hub-docs, docs/hub/repositories-licenses.md)."""

OWN = PurePath("src/deepspeed_recipes/samples")
"""Folder of the models that the project has derived from the page's model, under its licence."""


def licence_of_base(recipe: Recipe) -> str | None:
    """Return the licence of the model that a recipe starts from, as stated by its page's `LICENCE`.

    None if it starts from another model than its page's, from random weights, or from a page outside the project, which
    would have to be executed.
    """
    if recipe.page or recipe.draft.enabled or recipe.family not in pages.families():
        return None
    module = pages.page(recipe.family)
    model = module.SIZES.get(recipe.size)
    started = portable_path(recipe.model.path)
    if model is None or (portable_path(model.path) != started and PurePath(started).parent != OWN):
        return None
    return pages.licence(module, recipe.size)


def changes(recipe: Recipe) -> list[str]:
    """Return the overrides that turn the page's recipe into this one, or all of its keys if there is no such page."""
    page = None
    if not recipe.page and recipe.family in pages.families():
        with suppress(UserError):  # the page has no such size or variant any more
            page = portable_recipe(pages.find(f"{recipe.family}-{recipe.size}", recipe.variant))
    if page is None:
        return overrides.as_typed(recipe, overrides.override_keys())
    found = overrides.differences(page, recipe)
    # `data.path` changes the held-out data, unless that is given too.
    settled = portable_recipe(overrides.apply(page, found))
    return [*found, *(change for change in overrides.differences(settled, recipe) if change not in found)]
