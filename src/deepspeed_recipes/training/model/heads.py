"""Output heads of models: logits over the vocabulary, scores of a sequence (a reward or classes), or none.

`start` initialises the head of a reward model or a classifier, which the files of a language model lack.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.runtime.zero import GatheredParameters
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from ...recipe.files import Json
from ...recipe.recipe import Recipe
from ..model_folder.base_model import Head

CLASSES: dict[Head, Any] = {
    "vocabulary": AutoModelForCausalLM,
    "vision": AutoModelForImageTextToText,
    "scores": AutoModelForSequenceClassification,
    "none": AutoModel,
}
"""The class with which transformers loads a model with each head."""
NAMES = ("score", "classifier")
"""Names of the head in transformers' sequence-classification models; PEFT uses the same."""


def trained_by(recipe: Recipe) -> Head:
    """Return the head of the model that a recipe trains."""
    if recipe.model.vision:
        return "vision"
    return "scores" if recipe.method.scores else "none" if recipe.method.embeds else "vocabulary"


def options(labels: Sequence[str]) -> Json:
    """Return the arguments of `from_pretrained` for a classifier with these classes; a reward model has none."""
    if not labels:
        return {"num_labels": 1}
    return {"id2label": dict(enumerate(labels)), "label2id": {name: index for index, name in enumerate(labels)}}


def outputs(output: Any) -> torch.Tensor:
    """Return the result of a forward pass: logits, or hidden states of a model without a head."""
    logits = getattr(output, "logits", None)
    return output.last_hidden_state if logits is None else logits


def missing(names: set[str]) -> tuple[set[str], set[str]]:
    """Return the missing weights of a model's files that belong to its head, and the others."""
    head = {name for name in names if name.partition(".")[0] in NAMES}
    return head, names - head


def start(model: PreTrainedModel, seed: int) -> None:
    """Initialise the head with random values that depend only on its name and the seed; a collective under ZeRO-3.

    transformers would draw them from the process's random state, which differs between ranks and after a resume.
    """
    width = getattr(model.config.get_text_config(), "initializer_range", None) or 0.02
    for name, parameter in model.named_parameters():
        if name.partition(".")[0] not in NAMES:
            continue
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        with torch.no_grad(), GatheredParameters([parameter] if hasattr(parameter, "ds_id") else [], modifier_rank=0):
            if parameter.numel():  # under ZeRO-3 the other ranks only take part
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * width)
