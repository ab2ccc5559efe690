"""Writes README.md of an exported folder: a model card in the Hub's form, from the content of the folder."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ...recipe import deepspeed_file
from ...recipe.errors import printable, redact
from ...recipe.methods import metrics
from ...recipe.recipe import Recipe, names
from ...recipe.run_folder import read_json
from . import head, licences, record, reproduce
from .base_model import ADAPTER, KEY, QUANTIZATION, is_hub_id
from .record import Record

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


def write(folder: Path, name: str = UNPUBLISHED) -> bool:
    """Write the card of an exported folder, or return False if its training is not recorded."""
    held = record.read(folder)
    if held is None:
        return False
    make(folder, held, name).save(folder / FILE)
    return True


def make(folder: Path, held: Record, name: str) -> ModelCard:
    """Return the card of an exported folder.

    Args:
        folder: the export.
        held: the record in its `training/`.
        name: the model's on the Hub.
    """
    contents = look(folder)
    recipe, results = held.recipe, held.results
    data = metadata(held, contents)
    environment = results.get("environment") or {}
    file = folder / record.FOLDER / record.DEEPSPEED
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=name,
        code=code,
        plain=plain,
        recipe=recipe,
        results=results,
        contents=contents,
        base=base_name(recipe),
        hub_base=data.base_model,
        base_licence=licences.of_base(recipe),
        sources=[redact(source) for source in names(recipe.data.path)],
        validation=redact(recipe.data.validation or ""),
        stage=deepspeed_file.read(str(file)).stage if file.exists() else None,
        score=(lambda value: score(results.get("metric"), value)),
        quantised_score=(lambda value: score(results[record.QUANTIZATION].get("metric"), value)),
        environment=environment,
        command=redact(reproduce.command(recipe, environment.get("world_size") or 1)),
    )


def look(folder: Path) -> Contents:
    """Return the properties of a folder."""
    adapter = read_json(folder / ADAPTER) if (folder / ADAPTER).exists() else {}
    tokenizer = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    return Contents(
        adapter=bool(adapter),
        base=str(adapter.get(KEY) or ""),
        scores=head.of_folder(folder) == "scores",
        labels=tuple(head.labels_of(folder)),
        embeds=head.of_folder(folder) == "none",
        sees=head.of_folder(folder) == "vision",
        quantized=(folder / QUANTIZATION).exists(),
        chat=(folder / "chat_template.jinja").exists() or bool(tokenizer.get("chat_template")),
        gguf=next((file.name for file in folder.glob("*.gguf")), None),
    )


def metadata(held: Record, contents: Contents) -> ModelCardData:
    """Return the card's YAML, without names that the Hub cannot resolve, such as a local base model."""
    recipe = held.recipe
    known = is_hub_id(recipe.model.path) and not recipe.draft.enabled
    adapters = ["lora"] * (recipe.lora is not None) + ["dora"] * bool(recipe.lora and recipe.lora.dora)
    base = {"base_model": recipe.model.path} if known else {}
    relation = {"base_model_relation": "adapter" if contents.adapter else "finetune"} if known else {}
    return ModelCardData(
        **base,
        **relation,
        **licences.metadata(licences.of_base(recipe)),
        datasets=[name for name in names(recipe.data.path) if is_hub_id(name)] or None,
        library_name=library(contents),
        pipeline_tag=task(contents),
        tags=["deepspeed", "deepspeed-recipes", recipe.method, *adapters],
        model_name=recipe.name,
        eval_results=evaluations(held, contents),
    )


def evaluations(held: Record, contents: Contents) -> list[EvalResult] | None:
    """Return the run's score in the Hub's form, or None if it has none."""
    metric, after = held.results.get("metric"), held.results.get("after")
    if not metric or after is None:
        return None
    source = held.recipe.data.validation or held.recipe.data.path
    return [
        EvalResult(
            task_type=task(contents),
            dataset_type=redact(names(source)[0]),
            dataset_name="held-out examples",
            metric_type=metric,
            metric_name=metrics.title(metric),
            metric_value=after,
        )
    ]


def library(contents: Contents) -> str:
    """Return the Hub's name of the library that loads the model."""
    if contents.gguf:
        return "gguf"
    return "sentence-transformers" if contents.embeds else "peft" if contents.adapter else "transformers"


def task(contents: Contents) -> str:
    """Return the Hub's name of the model's task."""
    if contents.embeds:
        return "sentence-similarity"
    if contents.sees:
        return "image-text-to-text"
    return "text-classification" if contents.scores else "text-generation"


def base_name(recipe: Recipe) -> str:
    """Return the card's name of the base model, in Markdown."""
    if recipe.draft.enabled:
        return (
            f"a randomly initialised model of the architecture of {recipe.family}-{recipe.size}, shrunken (`--draft`)"
        )
    if is_hub_id(recipe.model.path):
        return f"[{recipe.model.path}](https://huggingface.co/{recipe.model.path})"
    return code(redact(recipe.model.path))


def code(text: object) -> str:
    """Return text as code in a line of Markdown or a table's cell; a model's folder may hold any text."""
    line = " ".join(printable(text).split()).replace("|", "\\|")
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    return f"{fence} {line} {fence}" if "`" in line else f"{fence}{line}{fence}"


def plain(text: object) -> str:
    """Return text for a line of Markdown or a table's cell, with all special characters escaped."""
    return re.sub(r"([\\`*\[\]<>|#&!~])", r"\\\1", " ".join(printable(text).split()))


def score(metric: str | None, value: Any) -> str:
    """Return a score in readable form, or a dash if there is none."""
    if not isinstance(value, int | float):
        return "-"
    return metrics.shown(str(metric), value)
