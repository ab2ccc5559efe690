"""Combines several LoRA adapters of one base model into a single adapter: the weighted sum of their changes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from ..recipe.errors import UserError
from ..recipe.run_folder import read_json
from ..training.model_folder import base_model, card
from ..training.model_folder.base_model import ADAPTER, KEY

SUM = "sum"
"""The name of the sum among the model's adapters."""
MORE = ("use_dora", "target_parameters", "modules_to_save", "trainable_token_indices", "lora_bias", "use_rslora")
"""Keys of adapters that are more than the product of two matrices, or whose sum PEFT would scale by the root of its
rank."""
TOLERANCE = 1e-4
"""The largest difference of a weight from the sum of the parts, relative to the largest change of its matrix."""


CARD = """---
{{ card_data }}
---

# A sum of adapters

The weighted sum of {{ rows | length }} LoRA adapters for `{{ base }}`.

| adapter | weight |
|---|---|
{% for name, weight in rows -%}
| {{ name }} | {{ "%g" | format(weight) }} |
{% endfor -%}
"""


@dataclass(frozen=True)
class Part:
    """An adapter of the sum."""

    name: str
    """The adapter's name as typed."""
    folder: Path
    weight: float


def check(parts: Sequence[Part]) -> None:
    """Refuse adapters that cannot be added up.

    They must have one base model, be no more than products of two matrices, and not cancel each other by their weights.
    """
    first, totals = parts[0], dict.fromkeys([part.folder.resolve() for part in parts], 0.0)
    for part in parts:
        totals[part.folder.resolve()] += part.weight
    if not any(totals.values()):
        weights = ", ".join(f"{part.weight:g} x {part.name}" for part in parts)
        raise UserError(f"--add: {weights}: the sum would change nothing; correct a weight.")
    for part in parts:
        if not (part.folder / ADAPTER).exists():
            raise UserError(f"{part.name}: not an adapter; only adapters of one base model can be added up.")
        config = read_json(part.folder / ADAPTER)
        kept = next((key for key in MORE if config.get(key)), None)
        if config.get("peft_type") != "LORA" or kept:
            raise UserError(
                f"{part.name}: {kept or config.get('peft_type')}: only plain LoRA adapters can be added up."
            )
        base = base_model.find(part.folder)
        if base != base_model.find(first.folder):
            raise UserError(
                f"{part.name}: an adapter for {base}, but {first.name} is for another base model; all must share one."
            )
        quantized = [(one.folder / card.QUANTIZATION).exists() for one in (first, part)]
        if quantized[0] != quantized[1]:
            raise UserError(
                f"{part.name} and {first.name}: only one was trained on 4-bit weights; add adapters of one kind."
            )


def add(base: object, parts: Sequence[Part], folder: Path, merged: bool) -> None:
    """Write the sum of adapters and its card to a new `folder`, after comparing every matrix with the sum of the parts.

    The rank of the sum is the sum of the ranks, so nothing is lost (PEFT's `add_weighted_adapter`, `cat`). `parts` are
    accepted by `check`, and are added to `base`, the model on which they were trained. The card lists them, for the
    adapter or, if it will be `merged`, for the merged model. Raises RuntimeError if a matrix differs from the sum of
    the parts.
    """
    from ..training.export import with_adapter

    names = [f"part{number}" for number in range(len(parts))]
    model = with_adapter(base, parts[0].folder, names[0])
    for name, part in zip(names[1:], parts[1:], strict=True):
        model = with_adapter(model, part.folder, name)
    weights = [part.weight for part in parts]
    model.add_weighted_adapter(names, weights, SUM, combination_type="cat")
    worst = difference(model, names, weights)
    if not worst <= TOLERANCE:
        raise RuntimeError(
            f"the sum of the adapters differs by {worst:.1e} of the largest change (allowed {TOLERANCE})"
        )
    model.save_pretrained(folder, selected_adapters=[SUM])
    for file in (folder / SUM).iterdir():
        file.replace(folder / file.name)
    (folder / SUM).rmdir()
    origin, named = str(base_model.find(parts[0].folder)), {}
    if base_model.is_hub_id(origin):
        named = {"base_model": origin, "base_model_relation": "finetune" if merged else "adapter"}
    else:
        origin = Path(read_json(folder / ADAPTER)[KEY]).name
    data = ModelCardData(
        library_name="transformers" if merged else "peft",
        pipeline_tag="text-generation",
        tags=["lora", "merge"],
        **named,
    )
    rows = [(Path(part.name).name, part.weight) for part in parts]
    ModelCard.from_template(data, template_str=CARD, rows=rows, base=origin).save(folder / card.FILE)


def difference(model: Any, names: Sequence[str], weights: Sequence[float]) -> float:
    """Return the largest difference between the sum's matrices and the sum of the parts, relative to the largest."""
    worst = 0.0
    for module in model.modules():
        held = [
            name for name in names if any(name in getattr(module, part, {}) for part in ("lora_A", "lora_embedding_A"))
        ]
        if held:
            pairs = zip(names, weights, strict=True)
            expected = sum(weight * module.get_delta_weight(name).float() for name, weight in pairs if name in held)
            off = (module.get_delta_weight(SUM).float() - expected).abs().max()
            worst = max(worst, (off / expected.abs().max().clamp(min=1e-12)).item())
    return worst
